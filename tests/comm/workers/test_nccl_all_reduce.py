"""Sums over the GPUs of several workers, on a libnccl for CPU memory; a thread is a worker."""

import threading
from datetime import timedelta

import pytest
import torch

from mirror.comm.nccl.clique import Clique, RankRange, new_identifier
from mirror.comm.workers import nccl_all_reduce
from mirror.comm.workers.nccl_all_reduce import NcclAllReduce, negotiate_nccl
from mirror.comm.workers.worker_group import LocalWorkerGroup
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
    fake, size = FakeNccl(), sum(counts)
    library = fake.library
    identifier = new_identifier(library)

    def work(first, count):
        devices = [torch.device("cpu")] * count
        clique = Clique(library, devices, SECONDS, SECONDS, RankRange(first, size, identifier))
        sums = NcclAllReduce(clique, devices)
        found = []
        for numel in (1, 1000):
            buffers = [
                torch.arange(numel, dtype=dtype) * 2.0**rank
                for rank in range(first, first + count)
            ]
            sums.start("gradients", buffers).wait(timedelta(seconds=SECONDS))
            found.append(buffers)
        sums.close()
        return found

    found = in_threads(counts, work)
    for numel, column in zip((1, 1000), zip(*found, strict=True), strict=True):
        for buffer in (buffer for buffers in column for buffer in buffers):
            assert buffer.equal(torch.arange(numel, dtype=dtype) * (2.0**size - 1))
    fake.assert_nothing_is_left()


@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (1, 2)])
def test_replicas_of_all_workers_have_all_sections(counts):
    fake, size = FakeNccl(), sum(counts)
    identifier = new_identifier(fake.library)

    def work(first, count):
        devices = [torch.device("cpu")] * count
        place = RankRange(first, size, identifier)
        sums = NcclAllReduce(Clique(fake.library, devices, SECONDS, SECONDS, place), devices)
        buffers = [torch.zeros(5 * size) for _ in devices]
        for rank, buffer in enumerate(buffers, first):
            buffer[5 * rank : 5 * rank + 5] = 1.0 + rank
        sums.start_gather("values", buffers, first, size).wait(timedelta(seconds=SECONDS))
        sums.close()
        return buffers

    whole = torch.arange(1.0, 1 + size).repeat_interleave(5)
    for buffers in in_threads(counts, work):
        assert all(buffer.equal(whole) for buffer in buffers)
    fake.assert_nothing_is_left()


def test_sizes_that_differ_end_the_clique():
    fake = FakeNccl()
    identifier = new_identifier(fake.library)

    def work(first, count):
        devices = [torch.device("cpu")] * count
        place = RankRange(first, 2, identifier)
        sums = NcclAllReduce(Clique(fake.library, devices, 1.0, SECONDS, place), devices)
        try:
            buffers = [torch.ones(5 + first)]
            sums.start("gradients", buffers).wait(timedelta(seconds=SECONDS))
        finally:
            sums.close()

    assert all(isinstance(error, MirrorError) for error in in_threads((1, 1), work))


def test_nccl_that_gives_no_identifier_is_told():
    fake = FakeNccl()
    fake.fail("ncclGetUniqueId")
    with pytest.raises(BackendError, match="ncclGetUniqueId returned"):
        new_identifier(fake.library)


class Talking(LocalWorkerGroup):
    """Workers in threads, which tell each other what they have to say."""

    def __init__(self, barrier, said, rank, counts):
        self.barrier, self.said = barrier, said
        self._set_counts(rank, counts)

    def exchange(self, what, signature=None, payload=bytes):
        self.said[self.rank] = payload()
        self.barrier.wait(SECONDS)
        return list(self.said)


def agree(monkeypatch, counts, *, gpus=None, reason=None):
    """Returns the sums that workers in threads agree on, and what they sum ones to."""
    fake, threads, said = FakeNccl(), threading.Barrier(len(counts)), [b""] * len(counts)
    numbers = iter(range(100))
    name = gpus or (lambda device: [str(next(numbers))])
    reasons = staticmethod(lambda devices: reason)
    monkeypatch.setattr(nccl_all_reduce.NcclCommunicator, "unavailable_reason", reasons)
    monkeypatch.setattr(nccl_all_reduce.libnccl, "nccl_library", lambda: fake.library)
    monkeypatch.setattr(nccl_all_reduce, "facts_of_gpu", name)

    def work(first, count):
        rank = [sum(counts[:r]) for r in range(len(counts))].index(first)
        devices = [torch.device("cpu")] * count
        sums = negotiate_nccl(Talking(threads, said, rank, counts), devices, SECONDS)
        if sums is None:
            return None
        buffers = [torch.ones(3) for _ in devices]
        sums.start("ones", buffers).wait(timedelta(seconds=SECONDS))
        sums.close()
        return [buffer.tolist() for buffer in buffers]

    return in_threads(counts, work)


def test_workers_with_gpus_of_their_own_agree_on_nccl(monkeypatch):
    assert agree(monkeypatch, (1, 2)) == [[[3.0] * 3], [[3.0] * 3] * 2]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"reason": "NCCL is not there"}, "worker 0: NCCL is not there"),
        ({"gpus": lambda device: ["the only one"]}, "workers 0 and 1 share a GPU"),
    ],
)
def test_where_nccl_cannot_serve_all_it_serves_none(monkeypatch, caplog, options, why):
    with caplog.at_level("INFO", logger="mirror"):
        assert agree(monkeypatch, (1, 1), **options) == [None, None]
    assert [why in record.getMessage() for record in caplog.records] == [True, True]


def test_unlike_versions_are_named():
    said = [{"reason": None, "version": 22703 + i, "gpus": []} for i in (0, 1)]
    assert (
        nccl_all_reduce._unavailable_reason(said)
        == "the workers have different versions of NCCL: 2.27.3, 2.27.4"
    )
