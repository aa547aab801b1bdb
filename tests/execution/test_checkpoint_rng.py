"""States of generators, saved and restored; generators of the user."""

import copy

import pytest
import torch
from torch import nn

import mirror
from mirror.devices import separate_streams
from tests.execution.failing import Drops, equal, masks, masks_in_run
from tests.pairs import each_once


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


@each_once(way=[1, 2, 3], restart=[False, True])
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
