"""Collectives over several workers: as over the replicas of one process."""

import os

import pytest
import torch

import mirror
from mirror.errors import DivergenceError
from tests.multi_worker import both, strategy_of
from tests.oracle import assert_same

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


def test_replicas_that_sit_out_count_for_nobody(worker_pool):
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
