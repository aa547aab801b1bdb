"""kernels.py: how many blocks of threads a kernel has, which changes no bit of what it does."""

import pytest
import torch

from mirror import comm

NAMES = ("direct", "hierarchical", "ring")
COUNTS = (1, 2, 5)


def blocks_of(communicator, collective, num_bytes):
    """Returns how many blocks each of a collective's kernels was started with."""
    started, run = [], communicator._machine.run

    def note(kernel, dtype, arguments, blocks):
        started.append(blocks)
        run(kernel, dtype, arguments, blocks)

    communicator._machine.run = note
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


@pytest.mark.parametrize("max_blocks", [0, -1, 17])
def test_no_blocks_and_too_many_are_refused(max_blocks):
    with pytest.raises(ValueError, match=f"1 to 16 blocks; got max_blocks={max_blocks}"):
        comm.create("ring", ["cpu"] * 2, max_blocks=max_blocks)
