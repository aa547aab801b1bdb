"""Kernels: the number of blocks changes no bit, and half types travel as two bytes.

Simulated kernels report what they read and write, and in which replica's memory.
"""

import functools
import sys

import numpy as np
import pytest
import torch

import mirror
from mirror import comm
from mirror.comm.communicator import HALF_DTYPES
from tests.pairs import pairwise

NAMES = ("direct", "hierarchical", "ring")
COUNTS = (1, 2, 5)


def blocks_of(communicator, collective, num_bytes):
    """Returns how many blocks each of a collective's kernels was started with."""
    started, run = [], communicator._machine.run

    def record_start(kernel, dtype, arguments, blocks):
        started.append(blocks)
        run(kernel, dtype, arguments, blocks)

    communicator._machine.run = record_start
    n = len(communicator.devices)
    getattr(communicator, collective)([torch.ones(num_bytes // 4) for _ in range(n)])
    communicator._machine.run = run
    return started


def every_result(communicator, values):
    for dtype in (torch.float32, torch.bfloat16):
        for op in ("sum", "max"):
            tensors = [value.to(dtype) for value in values]
            communicator.all_reduce(tensors, op, 1 / 3)
            yield torch.stack(tensors)
    for collective in ("reduce_scatter", "all_gather", "broadcast"):
        tensors = [value.clone() for value in values]
        getattr(communicator, collective)(tensors)
        n = len(tensors)
        if collective == "reduce_scatter":  # the other chunks are not specified
            yield torch.cat([tensor.tensor_split(n)[i] for i, tensor in enumerate(tensors)])
        else:
            yield torch.stack(tensors)


@pytest.mark.parametrize("name", NAMES)
def test_results_have_the_same_bits_for_every_number_of_blocks(name):
    n, found = 4, []
    for max_blocks in COUNTS:
        communicator = comm.create(name, ["cpu"] * n, max_blocks=max_blocks)
        generator = torch.Generator().manual_seed(7)
        results = []
        for size in (5, 30_001):
            values = [torch.randn(size, generator=generator) for _ in range(n)]
            results += every_result(communicator, values)
        assert blocks_of(communicator, "all_reduce", 4 * 150_000 * n) == [max_blocks]
        communicator.close()
        found.append(results)
    first, *others = found
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("name", NAMES)
def test_there_are_as_many_blocks_as_one_replica_has_work_for(name):
    communicator = comm.create(name, ["cpu"] * 4, max_blocks=16)
    unit = communicator._machine.bytes_per_block
    for num_bytes, wanted in ((4, 1), (64 * unit, 16), (12 * 4 * unit, 12), (65 * 4 * unit, 16)):
        assert blocks_of(communicator, "reduce_scatter", num_bytes) == [wanted]
    around = 4 if name == "ring" else 1  # a broadcast around a ring is one chunk
    assert blocks_of(communicator, "broadcast", 4 * unit) == [around]
    small = 4 if name == "direct" else 1  # every replica reduces all of a small message
    assert blocks_of(communicator, "all_reduce", 4 * unit) == [small]


@pytest.mark.parametrize("name", NAMES)
def test_results_are_exact_when_messages_of_different_sizes_alternate(name):
    """The counters of blocks that one message leaves out are those of the next one."""
    n = 4
    communicator = comm.create(name, ["cpu"] * n, max_blocks=5)
    communicator._machine.block_limits = ((100_000, 2), (1_000_000, 3), (sys.maxsize, 5))
    reference = comm.create(name, ["cpu"] * n, max_blocks=1)
    generator = torch.Generator().manual_seed(7)
    sizes = {
        40_000: 2 if name == "direct" else 1,
        100_000: 2,
        100_004: 3 if name == "direct" else 2,
        900_000: 3,
        2_000_000: 5,
    }
    for num_bytes, blocks in [*sizes.items(), *reversed(sizes.items())]:
        assert blocks_of(communicator, "all_reduce", num_bytes) == [blocks]
        values = [torch.randn(num_bytes // 4, generator=generator) for _ in range(n)]
        found, wanted = (
            list(every_result(one, [value.clone() for value in values]))
            for one in (communicator, reference)
        )
        assert all(map(torch.equal, found, wanted))
    communicator.close()
    reference.close()


@pytest.mark.parametrize("max_blocks", [0, -1, 17])
def test_no_blocks_and_too_many_are_refused(max_blocks):
    with pytest.raises(ValueError, match=f"1 to 16 blocks; got max_blocks={max_blocks}"):
        comm.create("ring", ["cpu"] * 2, max_blocks=max_blocks)


# Chunks of equal size for every number of replicas below.
SIZE = 9_600
DTYPES = (torch.float32, torch.bfloat16)


def values(n, dtype, size=SIZE):
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(n)]


def bytes_moved(communicator, collective, tensors, *args):
    """Returns how many bytes an element a collective moves from each replica to each other."""
    n = len(communicator.devices)
    communicator._machine.moved = matrix = torch.zeros(n, n, dtype=torch.int64)
    getattr(communicator, collective)(tensors, *args)
    communicator._machine.moved = None
    return matrix.double() / tensors[0].numel()


def reduced_bytes(dtype, terms, partial_sums, op):
    """Returns in how many bytes the sum of so many terms travels: a single one as it is."""
    is_element = terms == 1 or partial_sums == "rounded" or op in ("min", "max")
    return dtype.itemsize if is_element else 4


@pairwise(n=[2, 3, 4, 8], dtype=DTYPES, partial_sums=["exact", "rounded"], op=["sum", "max"])
def test_a_ring_sends_first_terms_and_results_in_two_bytes(n, dtype, partial_sums, op):
    communicator = comm.create("ring", ["cpu"] * n, partial_sums=partial_sums)
    halves = [reduced_bytes(dtype, terms, partial_sums, op) for terms in range(1, n)]
    found = bytes_moved(communicator, "all_reduce", values(n, dtype), op)
    for i in range(n):
        for j in range(n):
            wanted = (sum(halves) + (n - 1) * dtype.itemsize) / n if j == (i + 1) % n else 0
            assert found[i, j] == pytest.approx(wanted) or i == j
    found = bytes_moved(communicator, "reduce_scatter", values(n, dtype), op)
    assert float(found[0, 1]) == pytest.approx(sum(halves) / n)


@pairwise(dtype=DTYPES, partial_sums=["exact", "rounded"], op=["sum", "min"])
@pytest.mark.parametrize(("n", "g"), [(4, 2), (6, 3), (6, 2), (8, 4), (4, 4)])
def test_islands_send_each_other_sums_and_the_rest_as_elements(n, g, dtype, partial_sums, op):
    k = n // g
    islands = [range(i * g, i * g + g) for i in range(k)]
    communicator = comm.create(
        "hierarchical", ["cpu"] * n, islands=islands, partial_sums=partial_sums
    )
    found = bytes_moved(communicator, "all_reduce", values(n, dtype), op)
    is_inside = torch.tensor([[i // g == j // g for j in range(n)] for i in range(n)])
    crossing = reduced_bytes(dtype, g, partial_sums, op) + dtype.itemsize
    for i in range(n):
        assert float(found[i][~is_inside[i]].sum()) == pytest.approx(crossing * (k - 1) / n)
        inside = float(found[i][is_inside[i]].sum() - found[i, i])
        # What members read from each other, and write to each other of all the results.
        assert inside == pytest.approx(2 * dtype.itemsize * (g - 1) / g)


@pytest.mark.parametrize("dtype", DTYPES)
def test_direct_moves_elements_both_ways(dtype):
    communicator = comm.create("direct", ["cpu"] * 4)
    found = bytes_moved(communicator, "all_reduce", values(4, dtype, 2**19))
    assert bool((found.fill_diagonal_(0).sum(1) == 2 * 3 / 4 * dtype.itemsize).all())


def rounded_ring(tensors, scale):
    """Reduces around the ring, and rounds at every hop."""
    n = len(tensors)
    chunks = [tensor.tensor_split(n) for tensor in tensors]
    total = []
    for c in range(n):
        terms = [chunks[(c + 1 + i) % n][c] for i in range(n)]
        partial = functools.reduce(lambda a, b: (a.float() + b.float()).to(a.dtype), terms[:-1])
        total.append(((partial.float() + terms[-1].float()) * scale).to(partial.dtype))
    return torch.cat(total)


def rounded_islands(tensors, islands, scale):
    parts = [
        functools.reduce(torch.add, [tensors[i].float() for i in island]).to(tensors[0].dtype)
        for island in islands
    ]
    total = functools.reduce(torch.add, [part.float() for part in parts])
    return (total * np.float32(scale)).to(tensors[0].dtype)


@pytest.mark.parametrize("name", ["ring", "hierarchical"])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_rounded_at_every_hop_all_replicas_have_the_bits_of_the_model(name, dtype, n):
    communicator = comm.create(name, ["cpu"] * n, partial_sums="rounded")
    for size in (1, 7, 5_001):
        tensors = values(n, dtype, size)
        scale = float(np.float32(1 / 3))
        if name == "ring":
            expected = rounded_ring(tensors, scale)
        elif len(communicator.islands) > 1:
            expected = rounded_islands(tensors, communicator.islands, scale)
        else:  # nothing crosses, and nothing is rounded but the result
            total = functools.reduce(torch.add, [tensor.float() for tensor in tensors])
            expected = (total * np.float32(scale)).to(dtype)
        communicator.all_reduce(tensors, scale=scale)
        assert all(torch.equal(tensor, expected) for tensor in tensors)


@pytest.mark.parametrize("name", ["ring", "hierarchical"])
def test_wide_types_are_never_rounded(name):
    exact, rounded = (
        comm.create(name, ["cpu"] * 4, partial_sums=how) for how in ("exact", "rounded")
    )
    for dtype in (torch.float32, torch.float64, torch.int64):
        tensors = [(100 * value).to(dtype) for value in values(4, torch.float64, 5001)]
        others = [tensor.clone() for tensor in tensors]
        exact.all_reduce(tensors)
        rounded.all_reduce(others)
        assert all(map(torch.equal, tensors, others))


@pytest.mark.parametrize(("partial_sums", "share"), [("exact", 2 / 3), ("rounded", 1 / 2)])
def test_a_training_that_sends_bfloat16_around_a_ring_of_four_sends_less(partial_sums, share):
    sent = []
    for wire_dtype in (None, torch.bfloat16):
        communicator = comm.create("ring", ["cpu"] * 4, partial_sums=partial_sums)
        options = mirror.CommunicationOptions(wire_dtype=wire_dtype)
        with mirror.MirroredStrategy(
            ["cpu"] * 4, communicator, communication_options=options
        ) as strategy:
            model = strategy.mirror(torch.nn.Linear(40, 24, bias=False))
            model(torch.ones(4, 40)).sum().backward()
            model.zero_grad()
            matrix = torch.zeros(4, 4, dtype=torch.int64)
            communicator._machine.moved = matrix
            model(torch.ones(4, 40)).sum().backward()
            assert model.weight.grad.tolist() == [[4.0] * 40] * 24
            sent.append(int(matrix[1, 2]))
    assert sent == [6 * 40 * 24, share * 6 * 40 * 24]


@pytest.mark.parametrize("name", ["ring", "hierarchical"])
def test_partial_sums_of_another_kind_are_refused(name):
    with pytest.raises(ValueError, match=r"must be 'exact' or 'rounded'; got 'bfloat16'"):
        comm.create(name, ["cpu"] * 2, partial_sums="bfloat16")
