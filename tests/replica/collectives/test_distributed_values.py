"""reduce and gather over several workers: as of one process with as many replicas."""

import math
from functools import partial

import pytest
import torch

import mirror
from mirror.errors import DivergenceError
from mirror.values import ABSENT
from tests.multi_worker import both, strategy_of
from tests.oracle import assert_same

OPS = ("sum", "mean", "max", "min", "prod")


def of_each(strategy, make, weights=None):
    """Returns the parts of this worker's replicas; weights are those of all."""
    made = strategy.distribute_values_from_function(lambda c: (c.replica_id_in_sync_group,))[0]
    own = None if weights is None else [weights[r] for r in made.values]
    return mirror.PerReplica([make(r) for r in made.values], weights=own)


def part(shape, dtype, r):
    """Returns what differs between replicas: in its size, where that is 0."""
    shape = [size or r + 1 for size in shape]
    generator = torch.Generator().manual_seed(r)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def combined(counts):
    found = {}
    with strategy_of(counts) as strategy:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            alike = partial(part, (2, 3), dtype)
            rows, columns = partial(part, (0, 2), dtype), partial(part, (2, 0), dtype)
            for op in OPS:
                for weights in (None, [1.0, 3.0, 2.0, 5.0], [2.0, 0.0, 2.0, 2.0]):
                    value = of_each(strategy, alike, weights)
                    found[op, dtype, str(weights)] = strategy.reduce(op, value)
                for axis, make in ((0, rows), (-1, columns)):
                    found[op, dtype, axis] = strategy.reduce(op, of_each(strategy, make), axis)
        nested = {
            "n": of_each(strategy, lambda r: r + 1),
            "c": [of_each(strategy, partial(part, (2,), torch.complex64))],
        }
        found["sum"] = strategy.reduce("sum", nested)
        found["large"] = strategy.reduce(
            "mean", of_each(strategy, partial(part, (20_000,), torch.float32))
        )
        found["NaN"] = strategy.reduce(
            "mean", of_each(strategy, lambda r: math.nan if r == 1 else r, [4, 0, 3, 2])
        )
        found["nobody"] = strategy.reduce("mean", of_each(strategy, float, [0, 0, 0, 0]))
        found["absent"] = strategy.reduce("sum", of_each(strategy, lambda r: r or ABSENT))
        found["gather"] = strategy.gather(
            {
                "x": of_each(strategy, lambda r: torch.full((r, 2), float(r))),
                "flags": of_each(strategy, lambda r: torch.tensor([r > 0])),
            }
        )
        found["gather 1"] = strategy.gather(
            of_each(strategy, lambda r: torch.full((2, 3 - r), r)), axis=1
        )
    return [found] * len(strategy.devices)


@pytest.mark.parametrize("counts", [(1, 1), (1, 2)], ids=str)
def test_values_have_the_bits_of_one_process(worker_pool, counts):
    found, expected = both(worker_pool, combined, counts)
    for mine in found:
        assert_same(mine, expected[0])


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 2), (1, 1, 2)], ids=str)
def test_values_have_the_bits_of_one_process_on_more(worker_pool, counts):
    found, expected = both(worker_pool, combined, counts)
    for mine in found:
        assert_same(mine, expected[0])


def refused(counts, kind):
    with (
        strategy_of(counts) as strategy,
        pytest.raises(ValueError, match=r"re|ga") as caught,
    ):
        if kind == "shapes":
            strategy.reduce("sum", of_each(strategy, lambda r: torch.ones(r + 1)))
        elif kind == "plain":
            strategy.reduce("sum", torch.ones(2))
        elif kind == "gathered":
            strategy.gather(of_each(strategy, lambda r: torch.ones(1, r + 1)))
        else:
            strategy.reduce("max", of_each(strategy, lambda r: torch.ones(0)), axis=0)
    return [str(caught.value)] * len(strategy.devices)


@pytest.mark.parametrize("kind", ["shapes", "plain", "gathered", "nothing"])
def test_what_one_process_refuses_all_workers_do(worker_pool, kind):
    found, expected = both(worker_pool, refused, (1, 1), kind)
    assert found == expected


def empty_part(counts, sizes):
    """Returns gradients of a loss of parts, some of which are empty, with a collective inside."""
    with strategy_of(counts) as strategy:
        xs = of_each(
            strategy,
            lambda r: torch.linspace(0, 1, 2 * sizes[r]).view(-1, 2).requires_grad_(),
            [float(size) for size in sizes],
        )

        def fn(x):
            total = mirror.get_replica_context().all_reduce("sum", x.sum(0))
            return (x * total).square().mean()

        losses = strategy.run(fn, args=(xs,))
        loss = strategy.reduce("mean", losses)
        loss.backward()
        own = sum(xs.weights) / sum(sizes)
        grads = [torch.zeros_like(x) if x.grad is None else x.grad * own for x in xs.values]
        return [(grad, loss.item()) for grad in grads]


@pytest.mark.parametrize("sizes", [(3, 0), (0, 2), (2, 2)], ids=str)
def test_a_worker_without_examples_makes_the_pass_with_the_others(worker_pool, sizes):
    found, expected = both(worker_pool, empty_part, (1, 1), sizes)
    for (mine, loss), (theirs, whole) in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        assert loss == whole


def later(counts):
    """Differentiates a loss after other runs, with other weights, have come between."""
    with strategy_of(counts) as strategy:
        xs = of_each(strategy, lambda r: torch.full((2,), r + 1.0).requires_grad_(), [1.0, 5.0])
        loss = strategy.reduce("sum", strategy.run(lambda x: x.square().sum(), args=(xs,)))
        others = of_each(strategy, lambda r: torch.ones(1), [2.0, 6.0])
        strategy.run(lambda x: x, args=(others,))
        loss = loss * strategy.reduce("mean", strategy.run(lambda x: x.sum(), args=(xs,)))
        strategy.run(lambda x: x, args=(others,))
        loss.backward()
        own = sum(others.weights) / 8.0
        return [x.grad * own for x in xs.values]


def test_a_pass_counts_for_what_the_last_run_did(worker_pool):
    found, expected = both(worker_pool, later, (1, 1))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def own_losses():
    with strategy_of((1, 1)) as strategy:
        xs = of_each(strategy, lambda r: torch.ones(2 * r + 1), [1.0, 3.0])
        strategy.run(lambda x: x, args=(xs,))
        rank = strategy._group.replicas.workers.rank
        return strategy.reduce("mean", 4.0 * rank).item(), strategy.gather(torch.ones(rank)).shape


def test_a_plain_value_is_its_workers_and_counts_for_its_last_run(worker_pool):
    assert worker_pool(2).run(own_losses) == [(3.0, (1,)), (3.0, (1,))]


def in_merge_calls(counts):
    def both_ways(strategy, value):
        total = strategy.reduce("sum", value)
        x = torch.ones(1, requires_grad=True)
        refused = strategy.reduce("sum", mirror.PerReplica([x] * len(strategy.devices)))
        if len(counts) > 1:
            with pytest.raises(RuntimeError, match="merge_call, over several workers"):
                refused.backward()
        return total, strategy.gather(value)

    def fn(x):
        return mirror.get_replica_context().merge_call(both_ways, args=(x,))

    with strategy_of(counts) as strategy:
        xs = of_each(strategy, lambda r: torch.tensor([r + 1.0]))
        return list(strategy.local_results(strategy.run(fn, args=(xs,))))


def test_a_merge_call_has_local_parts_and_reduces_over_all(worker_pool):
    found, expected = both(worker_pool, in_merge_calls, (2, 1))
    assert_same(found, expected)


def parting():
    with strategy_of((1, 1)) as strategy:
        rank = strategy._group.replicas.workers.rank
        with pytest.raises(DivergenceError) as caught:
            strategy.reduce("sum" if rank else "mean", of_each(strategy, float))
        return str(caught.value)


def test_workers_that_reduce_unlike_are_named(worker_pool):
    first, second = worker_pool(2).run(parting)
    assert first == second
    assert "worker 0 of 2: reduce('mean', axis=None) at " in first
    assert "worker 1 of 2: reduce('sum', axis=None) at " in first
    assert first.count("test_distributed_values.py:") == 2
