"""The order of buckets over workers, the weights of workers, and sums over all replicas."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mirror
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.errors import DivergenceError
from mirror.replica.gradients.ready_grads import DeferredGrads, Reducer
from mirror.replica.gradients.shares import PassWeights
from mirror.replica.multi_worker.bucket_order import BucketOrder, agree
from mirror.replica.params.replicated_params import param_of
from tests.multi_worker import strategy_of
from tests.replica.multi_worker import test_multi_worker_gradients as programs
from tests.replica.multi_worker.programs import OneDevice, assert_as_one_device


@pytest.fixture
def variables():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        module = strategy.mirror(nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(4)]))
        yield [param_of(p) for p in module.parameters()]


def sequence_of(variables, sparse=(), bytes_per_pack=64):
    replicas = variables[0].replicas
    reducer = Reducer(replicas, bytes_per_pack, None)
    return BucketOrder(variables, sparse, 7, reducer, replicas.devices)


def test_the_order_is_that_of_arrival_then_that_of_registration_from_the_last(variables):
    workers = LocalWorkerGroup(2)
    order, sparse, total = agree(workers, variables, [variables[1]], 5.0)
    assert [variables.index(v) for v in order] == [1, 3, 2, 0]
    assert sparse == []
    assert total == 5.0
    assert agree(workers, variables, [], 0.0)[2] == 2.0  # never 0: weights are divided by it


def test_it_is_cut_into_buckets(variables):
    assert [len(b.variables) for b in sequence_of(variables).buckets] == [2, 2]
    assert [len(b.variables) for b in sequence_of(variables, bytes_per_pack=9999).buckets] == [4]


def test_what_is_frozen_keeps_its_place_for_some_reductions(variables):
    sequence = sequence_of(variables)
    assert sequence.fits(variables, 8)
    assert sequence.changes == 8
    assert [sequence.fits(variables[1:], 9) for _ in range(4)] == [True, True, True, False]


def test_what_is_new_wants_another(variables):
    assert not sequence_of(variables[1:]).fits(variables, 8)


def test_what_is_gone_keeps_its_place(variables):
    sequence = sequence_of(variables[1:3], sparse=variables[3:])
    sequence.forget(variables[1])
    sequence.forget(variables[3])
    assert sequence.sparse == [None]
    assert sequence.buckets[0].variables == [None, variables[2]]
    assert sequence.fits([variables[2]], 8)


def test_weights_are_shares_of_the_workers_total():
    weights = PassWeights({0: 3.0, 1: 1.0})
    weights.total = 4.0
    assert weights.shares(8.0) == {0: 0.375, 1: 0.125}
    assert weights.shares(0.0) == {0: 0.0, 1: 0.0}
    assert PassWeights({0: 1.0}).shares(8.0) == {0: 1.0}


@pytest.mark.parametrize("is_multi_process", [False, True])
def test_a_deferred_pass_without_gradients_counts_among_several_workers(
    variables, is_multi_process
):
    deferred = DeferredGrads(is_multi_process=is_multi_process)
    assert not deferred.has_passes
    deferred.add(variables[:1], [[None], [None]])  # other workers wait for a reduction
    assert deferred.has_passes == is_multi_process
    deferred.add(variables[:1], [[torch.ones(8)], [None]])
    assert deferred.has_passes
    deferred.drop(variables[0], [0, 1])
    assert deferred.has_passes == is_multi_process
    deferred.release()
    assert not deferred.has_passes


PROGRAMS = ("trains", "leaves_out", "uses_by_sign", "freezes", "accumulates", "passes_twice")


class OfCpus:
    """Sums replicas' buffers as NCCL would on GPUs: here, and then by gloo."""

    def __init__(self, workers):
        self.workers, self.num_sums = workers, 0

    def start(self, what, buffers):
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

    def start(self, what, buffers):
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
def test_buffers_of_different_sizes_are_an_error_on_all_workers(worker_pool):
    for summed, told in worker_pool(2).run(sums_unlike_buffers):
        assert summed == [2.0] * 4
        assert "torch.float32[4]" in told
        assert "torch.float32[5]" in told
