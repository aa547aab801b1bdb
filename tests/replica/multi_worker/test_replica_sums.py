"""Gradients summed over the replicas of all workers at once, as NCCL does, are one device's."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mirror.errors import DivergenceError
from tests.multi_worker import strategy_of
from tests.replica.multi_worker import test_multi_worker_gradients as programs
from tests.replica.multi_worker.beside_one_device import OneDevice, assert_as_one_device

PROGRAMS = ("trains", "leaves_out", "uses_by_sign", "freezes", "accumulates", "passes_twice")


class OfCpus:
    """Sums replicas' buffers as NCCL would on GPUs: here, and then by gloo."""

    def __init__(self, workers):
        self.workers, self.num_sums = workers, 0

    def begin(self, what, buffers):
        self.num_sums += 1
        total = torch.stack(list(buffers)).sum(0)
        finish = self.workers.all_reduce(what, total)
        return SimpleNamespace(wait=partial(self.end, buffers, total, finish))

    def end(self, buffers, total, finish, timeout):
        finish()
        for buffer in buffers:
            buffer.copy_(total)

    def close(self):
        pass


def by_replicas(name, place):
    """Runs a program, where there are workers with gradients summed over all replicas at once."""
    program = getattr(programs, name)
    if type(place) is OneDevice:
        program(place)
        return
    workers = place.strategy._group.replicas.workers
    sums = OfCpus(workers)
    workers.sum_replicas_by(sums)
    program(place)
    assert sums.num_sums > 0


@pytest.mark.parametrize(
    ("name", "counts", "way"),
    [
        *((name, (1, 2), 3) for name in PROGRAMS[:3]),
        *(pytest.param(name, (2, 2), 1, marks=pytest.mark.slow) for name in PROGRAMS),
        *(pytest.param(name, (1, 2), 2, marks=pytest.mark.slow) for name in PROGRAMS),
    ],
)
def test_gradients_are_those_of_one_device(worker_pool, name, counts, way):
    assert_as_one_device(worker_pool, partial(by_replicas, name), counts, way)


class Never:
    """A sum that does not come to its end, as NCCL's where sizes differ."""

    def begin(self, what, buffers):
        return self

    def wait(self, timeout):
        raise RuntimeError("the sum timed out")

    def close(self):
        pass


def sums_unlike_buffers():
    strategy = strategy_of((1, 1))
    workers = strategy._group.replicas.workers
    found = []
    for sums, sizes in ((OfCpus(workers), (4, 4)), (Never(), (4, 5))):
        workers.sum_replicas_by(sums)
        buffers = [torch.ones(sizes[workers.rank])]
        try:
            workers.all_reduce_replicas("gradients", buffers)()
            found.append(buffers[0].tolist())
        except DivergenceError as error:
            found.append(str(error))
    strategy.close()
    return found


@pytest.mark.slow
def test_buffers_of_unlike_sizes_are_an_error_on_all_workers(worker_pool):
    for summed, told in worker_pool(2).run(sums_unlike_buffers):
        assert summed == [2.0] * 4
        assert "torch.float32[4]" in told
        assert "torch.float32[5]" in told
