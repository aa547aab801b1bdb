"""Random numbers: reproducible bit for bit under one seed, and every replica's its own."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import mirror
from mirror.devices import separate_streams

REPLICAS = [1, 2, 3, 4]


class Drops(nn.Module):
    """Dropout on a vector of ones: the output is the mask."""

    def __init__(self, p=0.5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.drop(x * self.scale)


def masks(model, rows=12):
    return model(torch.ones(rows, 64)).detach()


def masks_in_run(strategy, model, rows=3):
    result = strategy.run(lambda: model(torch.ones(rows, 64)).detach())
    return torch.stack(strategy.local_results(result))


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


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("way", [1, 3])
@pytest.mark.parametrize("n", REPLICAS)
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
    """Equal rows, also equal places of the replicas' parts, get unlike masks."""
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


@pytest.mark.parametrize("way", [1, 3])
def test_a_saved_state_of_the_generator_reproduces_what_follows(way, make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(Drops())
    draw = masks if way == 1 else lambda model: masks_in_run(strategy, model)
    draw(model)
    state = torch.get_rng_state()
    first = [draw(model), draw(model)]
    torch.set_rng_state(state)
    assert equal([draw(model), draw(model)], first)


@pytest.mark.parametrize("restart", [False, True], ids=["same process", "new strategy"])
@pytest.mark.parametrize("way", [1, 2, 3])
def test_a_resumed_training_draws_the_masks_of_the_interrupted_one(way, restart, make_strategy):
    """torch's own generator state is all that a checkpoint needs of the replicas' streams."""
    torch.manual_seed(5)

    def start():
        strategy = make_strategy(4)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))
            return strategy, model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def go_on(strategy, model, optimizer, batches):
        def loss(x, y):
            return nn.functional.cross_entropy(model(x), y)

        def step(x, y):
            optimizer.zero_grad()
            value = loss(x, y)
            value.backward()
            optimizer.step()
            return value.detach()

        losses = []
        for batch in batches:
            (parts,) = strategy.distribute_dataset([batch])
            if way == 1:
                value = step(*batch)
            elif way == 2:
                optimizer.zero_grad()
                value = strategy.reduce("mean", strategy.run(loss, args=parts))
                value.backward()
                optimizer.step()
            else:
                value = strategy.reduce("mean", strategy.run(step, args=parts))
            losses.append(value.detach())
        state = [value.clone() for value in model.state_dict().values()]
        return [*losses, *state, torch.get_rng_state()]

    batches = [(torch.randn(n, 6), torch.randint(3, (n,))) for n in (9, 8, 3, 10, 7, 2)]
    training = start()
    _, model, optimizer = training
    go_on(*training, batches[:3])
    saved = copy.deepcopy((torch.get_rng_state(), model.state_dict(), optimizer.state_dict()))
    expected = go_on(*training, batches[3:])
    if restart:
        torch.manual_seed(99)
        training = start()
    _, model, optimizer = training
    random_state, model_state, optimizer_state = saved
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    torch.set_rng_state(random_state)
    assert equal(go_on(*training, batches[3:]), expected)


def test_streams_of_devices_are_kept_when_their_states_are_restored():
    """As torch.cuda.get_rng_state_all and set_rng_state_all do it; a state carries its seed."""

    def devices():
        generators = [torch.Generator() for _ in range(3)]
        for generator in generators:
            generator.manual_seed(7)
        return generators

    def draws(generators):
        separate_streams(generators)  # before every run
        return [torch.rand(4, generator=generator) for generator in generators]

    generators = devices()
    first = draws(generators)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    saved = [generator.get_state() for generator in generators]
    expected = draws(generators)
    restored = devices()
    for generator, state in zip(restored, saved, strict=True):
        generator.set_state(state)
    assert equal(draws(restored), expected)


@pytest.mark.parametrize("way", [1, 3])
def test_fork_rng_around_a_step_leaves_the_stream_as_it_was(way, make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(Drops())
    draw = masks if way == 1 else lambda model: masks_in_run(strategy, model)
    torch.manual_seed(3)
    expected = draw(model)
    torch.manual_seed(3)
    with torch.random.fork_rng():
        inner = draw(model)
        draw(model)
    assert torch.equal(inner, expected)
    assert torch.equal(draw(model), expected)


def test_fork_rng_inside_run_gives_equal_numbers_and_takes_none(make_strategy):
    """A seed inside a fork: the same numbers on all replicas, the stream outside untouched."""
    strategy = make_strategy(3)

    def step():
        before = torch.rand(4)
        with torch.random.fork_rng():
            torch.manual_seed(11)
            inside = torch.rand(4)
        return before, inside, torch.rand(4)

    torch.manual_seed(3)
    before, inside, after = strategy.run(step)
    torch.manual_seed(11)
    common = torch.rand(4)
    assert all(torch.equal(value, common) for value in inside.values)
    drawn = torch.stack([*before.values, *after.values])
    assert len(drawn.unique(dim=0)) == 6
    torch.manual_seed(3)
    again = strategy.run(step)
    assert equal(again[0].values + again[2].values, before.values + after.values)


def test_a_generator_per_replica_gives_its_own_numbers(make_strategy):
    """As a script makes them: one generator, seeded with the replica's number, in fn."""
    strategy = make_strategy(3)

    def step():
        replica = mirror.get_replica_context().replica_id_in_sync_group
        return torch.rand(4, generator=torch.Generator().manual_seed(100 + replica))

    torch.manual_seed(0)
    state = torch.get_rng_state()
    drawn = strategy.run(step).values
    for r, values in enumerate(drawn):
        assert torch.equal(values, torch.rand(4, generator=torch.Generator().manual_seed(100 + r)))
    assert torch.equal(torch.get_rng_state(), state)  # the global one is not touched


def test_one_generator_shared_by_all_replicas_is_drawn_from_in_replica_order(make_strategy):
    """On simulated devices replicas take turns, so a shared generator is deterministic."""
    strategy = make_strategy(3)
    generator = torch.Generator().manual_seed(8)
    drawn = strategy.run(lambda: torch.rand(4, generator=generator)).values
    generator.manual_seed(8)
    expected = [torch.rand(4, generator=generator) for _ in range(3)]
    assert equal(drawn, expected)


def test_a_generator_kept_by_the_model_is_reproducible(make_strategy):
    class Noisy(Drops):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(8)

        def forward(self, x):
            return x * self.scale + torch.rand(x.shape, generator=self.generator)

    drawn = []
    for _ in range(2):
        model = make_strategy(3).mirror(Noisy())
        drawn.append(masks(model))
        torch.rand(3)  # another stream
    assert torch.equal(*drawn)
    assert len(drawn[0].unique(dim=0)) == len(drawn[0])


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
