"""Collectives, reduce and gather over workers, and their gradients, as in one process.

The programs of gradients are drawn: chains of collectives and of local operations.
"""

import math
import os
import random
from functools import partial

import pytest
import torch

import mirror
from mirror.errors import DivergenceError, StrategyError
from mirror.values import ABSENT
from tests.multi_worker import both, strategy_of
from tests.oracle import assert_same
from tests.pairs import each_once

OPS = ("sum", "mean", "max", "min", "prod")
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int32, torch.int64, torch.uint8, torch.complex64),
)
LARGE = 20_000  # elements, more than are gathered from all


def context():
    return mirror.get_replica_context()


def drawn(shape, dtype, are_whole=False):
    """Returns what differs between replicas, the same in every process."""
    r = context().replica_id_in_sync_group
    generator = torch.Generator().manual_seed(1000 * r + sum(shape))
    if are_whole or not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(1, 5, shape, generator=generator).to(dtype)
    return torch.randn(shape, dtype=dtype, generator=generator)


def reduced(counts, are_whole):
    def fn():
        found = {}
        for dtype in DTYPES:
            for op in OPS:
                if dtype.is_complex and op in ("max", "min"):
                    continue
                for shape in ((), (3,), (2, 0), (2, 3)):
                    x = drawn(shape, dtype, are_whole)
                    found[f"{op} {dtype} {shape}"] = context().all_reduce(op, x)
            x = drawn((LARGE,), dtype, are_whole)
            found[f"large {dtype}"] = context().all_reduce("sum", {"x": x, "n": 3})
        rows = torch.zeros(5, 4)
        rows[context().replica_id_in_sync_group % 3 : 4 : 2] = drawn((4,), rows.dtype, are_whole)
        sparse = rows.to_sparse(1)
        for op in ("sum", "mean"):
            total = context().all_reduce(op, [sparse, drawn((2,), torch.float32, are_whole)])
            assert total[0].is_sparse
            found[f"sparse {op}"] = total[0].to_dense(), total[1]
        return found

    with strategy_of(counts) as strategy:
        return list(strategy.local_results(strategy.run(fn)))


@pytest.mark.parametrize(
    ("counts", "are_whole"), [((1, 1), False), ((1, 2), True)], ids=["1 and 1", "1 and 2"]
)
def test_every_reduction_has_the_bits_of_one_process(worker_pool, counts, are_whole):
    found, expected = both(worker_pool, reduced, counts, are_whole)
    for mine in found:
        assert_same(mine, expected[0])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("counts", [(2, 1), (2, 2), (1, 1, 1), (1, 2, 3)], ids=str)
def test_every_reduction_has_the_bits_of_one_process_on_more(worker_pool, counts):
    found, expected = both(worker_pool, reduced, counts, True)
    for mine in found:
        assert_same(mine, expected[0])


def totalled(counts):
    def fn():
        sizes = ((5,), (LARGE,))
        return [
            context().all_reduce("sum", drawn(size, dtype))
            for size in sizes
            for dtype in (torch.float32, torch.bfloat16)
        ]

    with strategy_of(counts) as strategy:
        return list(strategy.local_results(strategy.run(fn)))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_all_replicas_have_the_same_bits(worker_pool):
    first, *rest = [one for mine in worker_pool(3).run(totalled, (1, 2, 2)) for one in mine]
    assert len(rest) == 4
    for mine in rest:
        assert_same(mine, first)


def gathered(counts):
    def fn():
        r = context().replica_id_in_sync_group
        columns = drawn((2, 3 - r), torch.float32)
        value = {"rows": drawn((r, 2), torch.int64), "own": (torch.full((1,), r),)}
        sparse = torch.eye(2)[r % 2 :].to_sparse()
        return (
            context().all_gather(value),
            context().all_gather(columns, axis=-1),
            context().all_gather(torch.full((LARGE,), float(r))),
            context().all_gather(sparse).to_dense(),
        )

    with strategy_of(counts) as strategy:
        return list(strategy.local_results(strategy.run(fn)))


@pytest.mark.parametrize("counts", [(1, 1), (1, 2)], ids=str)
def test_what_is_gathered_is_in_the_order_of_all_replicas(worker_pool, counts):
    found, expected = both(worker_pool, gathered, counts)
    for mine in found:
        assert_same(mine, expected[0])


def sitting_out(counts):
    with strategy_of(counts) as strategy:
        own = strategy.distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
        parts = list(own.values)
        if 1 in parts and len(parts) > 1:
            parts[parts.index(1)] = mirror.values.ABSENT

        def fn(r):
            x = torch.full((2,), float(r))
            mean = context().all_reduce("mean", x)
            scaled = mirror.nn.scale_regularization_loss(torch.ones(()))
            average = mirror.nn.compute_average_loss(torch.ones(r + 1))
            return mean, context().all_gather(x), scaled, average * 100

        args = (mirror.PerReplica(parts),)
        return list(strategy.local_results(strategy.run(fn, args=args)))


def test_idle_replicas_count_zero_for_all_workers(worker_pool):
    found, expected = both(worker_pool, sitting_out, (2, 1))
    assert len(found) == 2
    assert_same(found[0][0], torch.tensor([1.0, 1.0]))
    assert_same(found, expected)


def parting(kind):
    strategy, rank = strategy_of((1, 1)), int(os.environ["RANK"])

    def fn():
        if kind == "shape":
            context().all_reduce("sum", torch.ones(2 + rank))
        elif kind == "op":
            context().all_reduce("sum" if rank else "max", torch.ones(2))
        elif kind == "structure":
            context().all_reduce("sum", [torch.ones(2)] if rank else torch.ones(2))
        elif kind == "dtype":
            context().all_gather(torch.ones(2, dtype=torch.int32 if rank else torch.int64))
        elif rank:
            context().all_gather(torch.ones(1))
        else:
            mirror.nn.compute_average_loss(torch.ones(1))

    with pytest.raises(DivergenceError) as caught:
        strategy.run(fn)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["shape", "op", "structure", "dtype", "operation"])
def test_workers_that_part_ways_are_named_with_their_lines(worker_pool, kind):
    messages = worker_pool(2).run(parting, kind)
    for message in messages:
        assert "worker 0 of 2: " in message
        assert "worker 1 of 2: " in message
        assert message.count("test_over_workers.py:") == 2


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
            same_part = partial(part, (2, 3), dtype)
            rows, columns = partial(part, (0, 2), dtype), partial(part, (2, 0), dtype)
            for op in OPS:
                for weights in (None, [1.0, 3.0, 2.0, 5.0], [2.0, 0.0, 2.0, 2.0]):
                    value = of_each(strategy, same_part, weights)
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
        found["no replica"] = strategy.reduce("mean", of_each(strategy, float, [0, 0, 0, 0]))
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


def parting_values():
    with strategy_of((1, 1)) as strategy:
        rank = strategy._group.replicas.workers.rank
        with pytest.raises(DivergenceError) as caught:
            strategy.reduce("sum" if rank else "mean", of_each(strategy, float))
        return str(caught.value)


def test_workers_that_reduce_differently_are_named(worker_pool):
    first, second = worker_pool(2).run(parting_values)
    assert first == second
    assert "worker 0 of 2: reduce('mean', axis=None) at " in first
    assert "worker 1 of 2: reduce('sum', axis=None) at " in first
    assert first.count("test_over_workers.py:") == 2


LINKS = ("sum", "mean", "gather", "pair", "own", "constant", "max", "large")


def link(kind, x, r):
    context = mirror.get_replica_context()
    if kind == "sum":
        return torch.tanh(context.all_reduce("sum", x)) * x
    if kind == "mean":
        return context.all_reduce("mean", x.square()) + x
    if kind == "gather":
        return x * context.all_gather(x[: 1 + r % 2]).sin().sum(0)
    if kind == "pair":
        a, b = context.all_reduce("sum", (x * (r + 1), x.sin()[:2]))
        return a + b.sum()
    if kind == "constant":  # for one of them
        return context.all_reduce("sum", x.detach() if r == 1 else x) * x
    if kind == "max":
        return x + context.all_reduce("max", x.detach())
    if kind == "large":
        return x + context.all_reduce("sum", x.mean().expand(20_000).clone())[:3].cos() / 100
    return torch.sin(x) * (r + 1)


def differentiated(counts, seed, way, weights):
    """Returns what each replica's input has for a gradient, in the loss of all."""
    draw = random.Random(seed)
    links = [draw.choice(LINKS) for _ in range(draw.randint(1, 4))]
    strategy = strategy_of(counts)
    ids = strategy.distribute_values_from_function(lambda c: c.replica_id_in_sync_group).values
    leaves = [
        torch.linspace(0.1, 1, 3, dtype=torch.float64).add(r / 7).requires_grad_() for r in ids
    ]
    own = [weights[r] for r in ids]
    times = draw.choice((1, 2))

    def fn(x, r):
        for kind in links:
            x = link(kind, x, r)
        loss = (x * x).mean()
        if way != "inside":
            return loss
        for i in range(times):
            loss.backward(retain_graph=i < times - 1)
        return loss.detach()

    losses = strategy.run(
        fn, args=(mirror.PerReplica(leaves, weights=own), mirror.PerReplica(ids))
    )
    if way == "inside":
        strategy.close()
        return [leaf.grad for leaf in leaves]
    if way == "own":  # each worker's loss is that of its own examples
        loss = sum(w * y for w, y in zip(own, strategy.local_results(losses), strict=True))
        loss = loss / sum(own)
    elif way == "reduce":
        loss = strategy.reduce("mean", losses)
    else:
        loss = strategy.gather({"a": losses_of(strategy, losses)})["a"].square().sum()
        loss = loss + strategy.reduce("sum", losses).sin()
    for i in range(times):
        loss.backward(retain_graph=i < times - 1)
    counts_for = sum(own) / sum(weights)
    strategy.close()
    return [leaf.grad * counts_for for leaf in leaves]


def losses_of(strategy, losses):
    return mirror.PerReplica([one[None] for one in strategy.local_results(losses)])


def compare(worker_pool, counts, seed, way):
    weights = [float(random.Random(seed).randint(1, 9)) for _ in range(sum(counts))]
    found, expected = both(worker_pool, differentiated, counts, seed, way, weights)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@each_once(
    counts=[pytest.param(value, id=str(value)) for value in [(1, 1), (1, 2)]],
    way=["inside", "own", "reduce", "gather"],
)
def test_gradients_are_those_of_one_process(worker_pool, counts, way):
    for seed in range(6):
        compare(worker_pool, counts, seed, way)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["inside", "own", "reduce", "gather"])
@pytest.mark.parametrize("counts", [(2, 2), (1, 1, 2)], ids=str)
def test_gradients_are_those_of_one_process_in_more_programs(worker_pool, counts, way):
    for seed in range(100, 140):
        compare(worker_pool, counts, seed, way)


def twice_inside(counts):
    strategy = strategy_of(counts)
    ids = strategy.distribute_values_from_function(lambda c: c.replica_id_in_sync_group).values

    def fn(r):
        x = torch.linspace(0.1, 1, 3, dtype=torch.float64).add(r / 7).requires_grad_()
        y = mirror.get_replica_context().all_reduce("sum", x.square()).sin()
        (grad,) = torch.autograd.grad((y * x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return x.grad

    with strategy:
        return list(strategy.local_results(strategy.run(fn, args=(mirror.PerReplica(ids),))))


def test_second_derivatives_inside_run_are_those_of_one_process(worker_pool):
    found, expected = both(worker_pool, twice_inside, (1, 2))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def twice_outside():
    with strategy_of((1, 1)) as strategy:
        x = torch.ones(3, requires_grad=True)
        y = strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", x * x))
        with pytest.raises(StrategyError, match="create_graph"):
            torch.autograd.grad(strategy.local_results(y)[0].sum(), x, create_graph=True)


def test_second_derivatives_outside_run_are_refused(worker_pool):
    worker_pool(2).run(twice_outside)
