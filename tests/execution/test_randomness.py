"""Random numbers: reproducible bit for bit under one seed, and different on every replica."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import mirror
from tests.execution.failing import Drops, equal, masks, masks_in_run
from tests.pairs import each_once

REPLICAS = [1, 2, 3, 4]


def train(strategy, way, steps=4, seed=5):
    """Training with dropout; returns all bits it leaves."""
    torch.manual_seed(seed)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    for size in (10, 7, 2, 1)[:steps]:
        batch = torch.randn(size, 6), torch.randint(3, (size,))
        if way == 1:
            losses.append(step(*batch))
        else:
            (parts,) = strategy.distribute_dataset([batch])
            losses.append(strategy.reduce("mean", strategy.run(step, args=parts)))
        strategy.check_replicas()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@each_once(n=REPLICAS, way=[1, 3])
def test_one_seed_gives_one_training_bit_for_bit(n, way, make_strategy):
    first, second, other = (train(make_strategy(n), way, seed=seed) for seed in (5, 5, 6))
    assert equal(first, second)
    assert not equal(first, other)


@pytest.mark.parametrize("way", [1, 3])
def test_one_seed_gives_one_training_on_one_strategy(way, make_strategy):
    """Also when the strategy, its threads and the generator have been used before."""
    strategy = make_strategy(3)
    first = train(strategy, way)
    strategy.run(lambda: torch.randn(5))
    torch.randn(3)
    train(strategy, 4 - way, seed=9)
    assert equal(train(strategy, way), first)


@pytest.mark.parametrize("n", [2, 3])
def test_an_unrelated_strategy_in_between_changes_nothing(n, make_strategy):
    first = train(make_strategy(n), 3)
    other = make_strategy(4)
    train(other, 3, seed=1)
    second = train(make_strategy(n), 3)
    train(other, 1, seed=2)
    assert equal(first, second)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_replicas_draw_their_own_masks_inside_run(n, make_strategy):
    strategy = make_strategy(n)
    model = strategy.mirror(Drops())
    drawn = masks_in_run(strategy, model)
    assert {0.0, 2.0} == set(drawn.unique().tolist())
    for i in range(n):
        for j in range(i):
            # Independent masks agree in one place of two.
            assert 0.3 < (drawn[i] == drawn[j]).float().mean() < 0.7


@pytest.mark.parametrize("n", [2, 3, 4])
def test_replicas_draw_their_own_masks_in_a_split_call(n, make_strategy):
    """Equal rows, also at equal positions of the replicas' parts, get different masks."""
    model = make_strategy(n).mirror(Drops())
    rows = masks(model)
    assert len(rows.unique(dim=0)) == len(rows)


@pytest.mark.parametrize("way", [1, 3])
def test_masks_differ_from_step_to_step(way, make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(Drops())
    draw = masks if way == 1 else lambda model: masks_in_run(strategy, model)
    drawn = [draw(model) for _ in range(4)]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


@pytest.mark.parametrize("way", [1, 3])
def test_the_expectation_under_dropout_is_that_of_one_device(way, make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(Drops(0.25))
    drawn = masks(model, 300) if way == 1 else masks_in_run(strategy, model, 100)
    assert drawn.mean().item() == pytest.approx(1.0, abs=0.02)
    assert (drawn == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)


def test_no_dropout_in_evaluation(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(Drops()).eval()
    assert torch.equal(masks(model), torch.ones(12, 64))
    assert torch.equal(masks_in_run(strategy, model), torch.ones(3, 3, 64))


@pytest.mark.parametrize("way", [1, 3])
def test_the_seed_reproduces_a_single_call(way, make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(Drops())
    draw = masks if way == 1 else lambda model: masks_in_run(strategy, model)
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(draw(model))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_seeding_inside_run_is_allowed(make_strategy):
    """Each replica seeds and draws before the next one has its turn."""
    strategy = make_strategy(2)

    def step():
        torch.manual_seed(21)
        return torch.rand(4)

    torch.manual_seed(21)
    expected = torch.rand(4)
    assert all(torch.equal(values, expected) for values in strategy.run(step).values)


@pytest.mark.parametrize("way", [1, 3])
def test_python_and_numpy_draw_in_replica_order(way, make_strategy):
    """Augmentations with random and numpy.random: reproducible, a draw of its own each."""
    strategy = make_strategy(3)

    class Augments(Drops):
        def forward(self, x):
            return x * self.scale * random.random() * np.random.rand()

    model = strategy.mirror(Augments())
    drawn = []
    for _ in range(2):
        random.seed(4)
        np.random.seed(4)
        drawn.append(masks(model, 3) if way == 1 else masks_in_run(strategy, model, 1)[:, 0])
    assert torch.equal(*drawn)
    assert len(drawn[0].unique(dim=0)) == 3


@pytest.mark.parametrize("way", [1, 3])
def test_idle_replicas_draw_nothing(way, make_strategy):
    """One example on four replicas draws what one device draws."""
    strategy = make_strategy(4)
    plain = Drops()
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.ones(1, 64)
    torch.manual_seed(3)
    expected = plain(x)
    torch.manual_seed(3)
    if way == 1:
        drawn = model(x)
    else:
        (parts,) = strategy.distribute_dataset([(x,)])
        (drawn,) = strategy.local_results(strategy.run(model, args=parts))
    assert torch.equal(drawn, expected)
    torch.manual_seed(3)
    plain(x)
    expected = torch.rand(4)
    torch.manual_seed(3)
    model(x)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("n", REPLICAS)
def test_initial_values_are_those_of_one_device(n, make_strategy):
    def build():
        return nn.Sequential(nn.Linear(6, 16), nn.LSTM(16, 4))

    torch.manual_seed(2)
    plain = build()
    after = torch.rand(4)
    torch.manual_seed(2)
    with make_strategy(n).scope():
        model = build()
    assert torch.equal(torch.rand(4), after)  # mirroring draws nothing
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("schedule", ["lockstep", "auto"])
def test_the_schedule_for_simulated_devices_is_deterministic(schedule, make_strategy):
    runs = []
    for _ in range(2):
        torch.manual_seed(6)
        strategy = make_strategy(4, schedule=schedule)
        model = strategy.mirror(Drops())

        def step(model=model):
            first = model(torch.ones(2, 64)).detach()
            total = mirror.get_replica_context().all_reduce("sum", first)
            return torch.stack([first, total, model(torch.ones(2, 64)).detach()])

        runs.append(torch.stack(strategy.run(step).values))
    assert torch.equal(*runs)


def test_a_failed_run_does_not_spoil_a_later_seeded_one(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(Drops())
    torch.manual_seed(3)
    expected = masks_in_run(strategy, model)

    def fails():
        torch.rand(5)
        if mirror.get_replica_context().replica_id_in_sync_group == 1:
            raise ValueError("on purpose")
        torch.rand(5)

    with pytest.raises(ValueError, match="on purpose"):
        strategy.run(fails)
    torch.manual_seed(3)
    assert torch.equal(masks_in_run(strategy, model), expected)
