"""A training on simulated GPUs: its streams are in order, whichever the program is on."""

import pytest
import torch

import mirror
from tests.gpu.fake import FakeGpus
from tests.gpu.placed import ROWS
from tests.gpu.programs import WAYS, names, train
from tests.pairs import EXHAUSTIVE, each_once

TWICE = ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


@pytest.fixture(scope="module")
def expected():
    return {
        (n, way): train(["cpu"] * n, way)
        for n in (1, 2, 4, 8)
        for way in ("plain", "transparent", "dataset")
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [1, 2, pytest.param(4, marks=EXHAUSTIVE), 8])
def test_training_is_in_order_and_has_the_losses_of_simulated_devices(n, way, expected):
    with FakeGpus(n) as gpus:
        losses = train(names(n), way)
        sides = [s for s in gpus.streams.everywhere.values() if s.cuda_stream != 0]
    assert losses == pytest.approx(expected.get((n, way), expected[n, "plain"]), rel=1e-5)
    assert sides or n == 1  # buckets were reduced beside the backward pass


@each_once(way=WAYS, schedule=["lockstep", "staggered"])
def test_every_schedule_is_in_order(way, schedule):
    with FakeGpus(2):
        train(names(2), way, schedule=schedule)


@pytest.mark.parametrize("way", WAYS)
def test_replicas_that_share_gpus_are_in_order(way):
    with FakeGpus(2):
        train(TWICE, way)


@pytest.mark.parametrize("rows", [names(2), names(3), ROWS, [*ROWS, ["cuda:4", "cuda:5"]]])
def test_gpus_that_were_seeded_alike_draw_apart_at_each_position(rows):
    places = [[row] if isinstance(row, str) else row for row in rows]
    seen = []

    def note():
        seen.append([each.initial_seed() for each in torch.cuda.default_generators])

    with FakeGpus(6), mirror.MirroredStrategy(rows, "naive") as strategy:
        for generator in torch.cuda.default_generators:  # as torch.manual_seed does
            generator.manual_seed(3)
        for _ in range(2):
            strategy.run(note)
    assert all(seeds == seen[0] for seeds in seen)
    for column in zip(*places, strict=True):
        own = [seen[0][torch.device(name).index] for name in column]
        assert own[0] == 3
        assert len(set(own)) == len(own)


def test_what_a_replica_sets_without_a_context_ends_with_its_run():
    seen = []
    with FakeGpus(2) as gpus, mirror.MirroredStrategy(names(2), "naive") as strategy:

        def fn():
            device = mirror.get_replica_context().device
            seen.append(torch.cuda.current_stream(device))
            torch.cuda.set_stream(torch.cuda.Stream(device))

        for _ in range(2):
            strategy.run(fn)
        defaults = [gpus.streams.default_stream(d) for d in gpus.devices]
    assert set(seen) == set(defaults)
    assert len(seen) == 4
