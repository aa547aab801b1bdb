"""Every replica has a random stream of its own, for any numbers of draws between merges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mirror
from mirror.execution.swapped_state import call_with_worker_rng
from tests.data.reading import Pretended
from tests.gpu.generators import FakeGenerator

N = 3
# How many numbers each replica draws before each of three merges.
COUNTS = st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=N, max_size=N)


@pytest.fixture(scope="module")
def strategy():
    with mirror.MirroredStrategy(["cpu"] * N) as strategy:
        yield strategy


def draw(strategy, counts):
    """Returns, by replica, what it draws in a run: ``counts[r][k]`` numbers before merge k."""
    numbers = [[] for _ in range(N)]

    def fn():
        context = mirror.get_replica_context()
        replica_id = context.replica_id_in_sync_group
        for count in counts[replica_id]:
            numbers[replica_id] += torch.rand(count).tolist()
            context.all_reduce("sum", torch.ones(1))

    strategy.run(fn)
    return numbers


@settings(max_examples=30)
@given(counts=COUNTS)
def test_what_a_replica_draws_does_not_depend_on_what_the_others_draw(strategy, counts):
    torch.manual_seed(5)
    most = draw(strategy, [[3, 3, 3]] * N)
    torch.manual_seed(5)
    for numbers, of_most in zip(draw(strategy, counts), most, strict=True):
        assert numbers == of_most[: len(numbers)]
    assert len({tuple(numbers) for numbers in most}) == N


@settings(max_examples=30)
@given(first=COUNTS, second=COUNTS)
def test_a_state_between_runs_is_all_that_what_follows_depends_on(strategy, first, second):
    draw(strategy, first)
    state = torch.get_rng_state()
    expected = draw(strategy, second), torch.rand(2).tolist()
    with mirror.MirroredStrategy(["cpu"] * N) as other:
        draw(other, first)
        torch.set_rng_state(state)
        assert (draw(other, second), torch.rand(2).tolist()) == expected


@settings(max_examples=30)
@given(counts=COUNTS)
def test_a_run_moves_the_generator_if_a_replica_draws(strategy, counts):
    state = torch.get_rng_state()
    draw(strategy, counts)
    somebody_drew = any(map(any, counts))
    assert torch.equal(torch.get_rng_state(), state) != somebody_drew


def test_the_first_replica_draws_what_one_device_draws(strategy):
    torch.manual_seed(5)
    expected = torch.rand(9).tolist()
    after = torch.rand(2)
    torch.manual_seed(5)
    assert draw(strategy, [[3, 3, 3]] * N)[0] == pytest.approx(expected)
    assert torch.equal(torch.rand(2), after)


def test_replicas_that_alone_draw_go_on_from_run_to_run(strategy):
    counts = [[0, 0, 0], [0, 0, 0], [2, 0, 0]]
    assert draw(strategy, counts) != draw(strategy, counts)


def test_merge_call_draws_what_the_first_replica_would(strategy):
    def fn(counts):
        context = mirror.get_replica_context()
        torch.rand(counts[context.replica_id_in_sync_group])
        return context.merge_call(lambda strategy: torch.rand(2).tolist())

    torch.manual_seed(5)
    first, *_ = strategy.run(fn, args=([1, 2, 3],))[0].values
    torch.manual_seed(5)
    second, *_ = strategy.run(fn, args=([1, 0, 7],))[0].values
    torch.manual_seed(5)
    assert first == second == torch.rand(3).tolist()[1]


def test_a_run_that_fails_leaves_a_state_that_reproduces(strategy):
    def fails():
        torch.rand(5)
        raise ValueError("on purpose")

    after = []
    for _ in range(2):
        torch.manual_seed(5)
        with pytest.raises(ValueError, match="on purpose"):
            strategy.run(fails)
        after.append(torch.rand(2))
    assert torch.equal(*after)


@pytest.mark.parametrize("counts", [[2, 3, 1], [2, 0, 0], [2, 2, 2]])
def test_what_follows_a_run_is_drawn_after_the_first_replica(counts, strategy):
    def fn():
        torch.rand(counts[mirror.get_replica_context().replica_id_in_sync_group])

    torch.manual_seed(5)
    strategy.run(fn)
    after = torch.rand(2)
    torch.manual_seed(5)
    torch.rand(counts[0])
    assert torch.equal(torch.rand(2), after)


def test_a_seed_makes_a_run_reproducible_with_unlike_streams(make_strategy):
    strategy = make_strategy(3)

    def draw():
        return [t.tolist() for t in strategy.run(lambda: torch.rand(4)).values]

    torch.manual_seed(5)
    first = [draw(), draw()]
    torch.manual_seed(5)
    assert [draw(), draw()] == first
    rows = [tuple(row) for rows in first for row in rows]
    assert len(set(rows)) == 6
    torch.manual_seed(6)
    assert draw() != first[0]


def test_a_seed_before_another_strategy_gives_the_same_streams(make_strategy):
    drawn = []
    for _ in range(2):
        strategy = make_strategy(2)
        torch.manual_seed(9)
        drawn.append([t.tolist() for t in strategy.run(lambda: torch.rand(4)).values])
    assert drawn[0] == drawn[1]


def test_dropout_masks_differ_between_the_parts_of_a_transparent_call(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5)))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
    y = model(torch.ones(2, 1))
    assert not torch.equal(y[0], y[1])
    torch.manual_seed(1)
    first = model(torch.ones(2, 1))
    torch.manual_seed(1)
    assert torch.equal(model(torch.ones(2, 1)), first)


@pytest.mark.parametrize("counts", [(2, 2), (1, 1, 1), (3, 1, 2)])
def test_gpus_of_all_workers_draw_different_numbers_and_go_on_between_runs(counts):
    """Each worker's process has seeded all of its GPUs alike, as ``torch.manual_seed`` does."""
    in_runs = list[tuple[int, int]]()
    for rank, count in enumerate(counts):
        gpus = [FakeGenerator(i).manual_seed(3) for i in range(count)]
        for run in range(2):
            begun = [gpu.get_offset() for gpu in gpus]

            def draw(gpus=gpus):
                for gpu in gpus:
                    in_runs.append((gpu.initial_seed(), gpu.get_offset()))
                    gpu.draw()

            call_with_worker_rng(Pretended(rank, counts), [gpus], draw)
            assert gpus[0].initial_seed() == 3  # of one device
            assert [gpu.get_offset() for gpu in gpus] == [4 + offset for offset in begun], run
    assert len(set(in_runs)) == 2 * sum(counts)
    assert (3, 0) in in_runs
