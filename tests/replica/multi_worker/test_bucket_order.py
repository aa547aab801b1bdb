"""The sequence serves until something is trained that it has not."""

import pytest
import torch
from torch import nn

import mirror
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.replica.collectives.packed_reducer import Reducer
from mirror.replica.multi_worker.bucket_order import BucketOrder, agree
from mirror.replica.params.replicated_params import param_of


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
    order, sparse = agree(workers, variables, [variables[1]], 5.0)
    assert [variables.index(v) for v in order] == [1, 3, 2, 0]
    assert sparse == []
    assert workers.reference == 5.0


def test_a_reference_is_never_nothing(variables):
    workers = LocalWorkerGroup(2)
    agree(workers, variables, [], 0.0)
    assert workers.reference == 2.0


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
