"""Sums over several workers' GPUs, on a libnccl for CPU memory: a thread stands for a worker."""

import threading
from datetime import timedelta

import pytest
import torch

from mirror.comm.nccl.clique import Clique
from mirror.comm.nccl.communicators import Place, new_identifier
from mirror.comm.workers.gpu_sums import GpuSums
from mirror.errors import BackendError, MirrorError
from tests.comm.nccl.fake_nccl import MISSING, FakeNccl

pytestmark = pytest.mark.skipif(bool(MISSING), reason=str(MISSING))
SECONDS = 20.0


def in_threads(counts, work):
    """Returns what ``work(first, count)`` has returned for each worker."""
    found = [None] * len(counts)

    def run(worker):
        try:
            found[worker] = work(sum(counts[:worker]), counts[worker])
        except Exception as error:
            found[worker] = error

    threads = [threading.Thread(target=run, args=(w,)) for w in range(len(counts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    return found


@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (1, 2), (2, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replicas_of_all_workers_have_the_sum(counts, dtype):
    library, size = FakeNccl().library, sum(counts)
    identifier = new_identifier(library)

    def work(first, count):
        devices = [torch.device("cpu")] * count
        clique = Clique(library, devices, SECONDS, SECONDS, Place(first, size, identifier))
        sums = GpuSums(clique, devices)
        found = []
        for numel in (1, 1000):
            buffers = [
                torch.arange(numel, dtype=dtype) * 2.0**rank
                for rank in range(first, first + count)
            ]
            sums.begin("gradients", buffers).wait(timedelta(seconds=SECONDS))
            found.append(buffers)
        sums.close()
        return found

    found = in_threads(counts, work)
    for numel, column in zip((1, 1000), zip(*found, strict=True), strict=True):
        for buffer in (buffer for buffers in column for buffer in buffers):
            assert buffer.equal(torch.arange(numel, dtype=dtype) * (2.0**size - 1))


def test_sizes_that_differ_end_the_clique():
    fake = FakeNccl()
    identifier = new_identifier(fake.library)

    def work(first, count):
        devices = [torch.device("cpu")] * count
        place = Place(first, 2, identifier)
        sums = GpuSums(Clique(fake.library, devices, 1.0, SECONDS, place), devices)
        try:
            buffers = [torch.ones(5 + first)]
            sums.begin("gradients", buffers).wait(timedelta(seconds=SECONDS))
        finally:
            sums.close()

    assert all(isinstance(error, MirrorError) for error in in_threads((1, 1), work))


def test_nccl_that_gives_no_identifier_is_told():
    fake = FakeNccl()
    fake.fail("ncclGetUniqueId")
    with pytest.raises(BackendError, match="ncclGetUniqueId returned"):
        new_identifier(fake.library)
