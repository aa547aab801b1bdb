"""Buckets bring gradients of any layout into one buffer, and back."""

import pytest
import torch
from torch import nn

import mirror
from mirror.replica.multi_worker.worker_bucket import (
    Signals,
    WorkerBucket,
    read_trailer,
    usual_trailer,
    write_trailer,
)
from mirror.replica.params.replicated_params import param_of


@pytest.fixture
def bucket_of():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:

        def make(tensors, wire=None):
            module = strategy.mirror(nn.ParameterList([nn.Parameter(t) for t in tensors]))
            variables = [param_of(p) for p in module.parameters()]
            return WorkerBucket(variables, wire, strategy.devices, on_host=True), module

        yield make


def layouts():
    turned = torch.randn(4, 3).t()
    image = torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    return [torch.randn(3), torch.randn(()), turned, image, torch.randn(0, 2)]


def test_gradients_come_back_as_they_were_in_the_layout_of_their_variables(bucket_of):
    bucket, module = bucket_of(layouts())
    grads = [torch.randn(p.shape) for p in module.parameters()]
    trailer = [1.0, 2.0]
    buffer = bucket.pack(grads, 1.0, trailer)
    assert buffer[bucket.num_elements :].tolist() == trailer
    for grad, found, p in zip(grads, bucket.unpack(buffer), module.parameters(), strict=True):
        assert torch.equal(found, grad)
        assert found.stride() == p.stride()
        assert not found._is_view()


def test_the_scale_is_of_gradients_and_not_of_the_tail(bucket_of):
    bucket, _ = bucket_of([torch.zeros(3)])
    buffer = bucket.pack([torch.ones(3)], 0.5, [1.0])
    assert bucket.unpack(buffer)[0].tolist() == [0.5] * 3
    assert buffer[-1] == 1.0


def test_a_gradient_begins_where_kernels_want_it(bucket_of):
    bucket, _ = bucket_of([torch.zeros(3), torch.zeros(5), torch.zeros(1)])
    buffer = bucket.pack([torch.ones(3), torch.ones(5), torch.ones(1)], 1.0, [])
    assert [grad.storage_offset() * 4 % 16 for grad in bucket.unpack(buffer)] == [0, 0, 0]


def test_complex_gradients_travel_as_real_numbers(bucket_of):
    bucket, _ = bucket_of([torch.randn(2, 3, dtype=torch.complex64)])
    grad = torch.randn(2, 3, dtype=torch.complex64).conj()
    (found,) = bucket.unpack(bucket.pack(bucket.view_as_real([grad]), 1.0, [0.0]))
    assert bucket.dtype == torch.float32
    assert torch.equal(found, grad)


def test_what_travels_may_be_coarser(bucket_of):
    bucket, _ = bucket_of([torch.zeros(3)], wire=torch.bfloat16)
    buffer = bucket.pack([torch.ones(3)], 0.5, [1.0])
    assert buffer.dtype == torch.bfloat16
    assert not bucket.ends_exactly


def test_a_variable_that_is_gone_keeps_its_place(bucket_of):
    bucket, module = bucket_of([torch.zeros(3), torch.zeros(2)])
    bucket.forget(param_of(module[0]))
    assert bucket.variables[0] is None
    assert [copy.grad is None for copy in bucket.copies[1][:1]] == [True]
    assert bucket.zeros(0, torch.device("cpu")).shape == (3,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.3])
def test_sums_are_packed_in_one_pass_with_the_bits_of_several(bucket_of, dtype, scale):
    shapes = [(3, 5), (7,), (), (0, 2), (4, 1, 2)]
    bucket, _ = bucket_of([torch.zeros(shape, dtype=dtype) for shape in shapes])
    columns = [[torch.randn(shape, dtype=dtype) for shape in shapes] for _ in range(2)]
    columns[1][0] = torch.randn(5, 3, dtype=dtype).t()  # as a hook may have left it
    before = [[grad.clone() for grad in column] for column in columns]
    trailer = usual_trailer(len(shapes), dtype, 3, 1, 2.0)
    for n in (1, 2):
        sums = [sum(row) for row in zip(*columns[:n], strict=True)]
        slowly = bucket.pack([scale * one for one in sums], 1.0, [])
        found = bucket.sum_replicas(columns[:n], scale, trailer)
        assert torch.equal(found[: bucket.num_elements], slowly)
        assert found[bucket.num_elements :].numpy().tobytes() == trailer
        for grad, one in zip(bucket.unpack(found), sums, strict=True):
            assert torch.equal(grad, scale * one)
    for column, kept in zip(columns, before, strict=True):
        assert all(map(torch.equal, column, kept))


def test_what_the_host_library_cannot_pack_is_packed_by_torch(bucket_of):
    assert bucket_of([torch.zeros(3)])[0].can_sum_replicas
    assert not bucket_of([torch.zeros(3)], wire=torch.bfloat16)[0].can_sum_replicas
    assert not bucket_of([torch.zeros(3, dtype=torch.bfloat16)])[0].can_sum_replicas
    assert not bucket_of([torch.zeros(3, dtype=torch.complex64)])[0].can_sum_replicas
    assert not bucket_of([torch.zeros(2, 3).t()])[0].can_sum_replicas


# Trailers report what each worker contributes, and which worker is at another reduction


def summed(*trailers):
    return read_trailer(torch.tensor(trailers).sum(0).tolist())


def test_what_workers_have_brought_is_counted():
    trailer = summed(
        write_trailer([1.0, 0.0], 5, Signals(3.0, more=True)),
        write_trailer([1.0, 1.0], 5, Signals(4.0, non_finite=True, failed=True)),
    )
    assert list(trailer.flags) == [2.0, 1.0]
    assert trailer.signals == Signals(7.0, more=1.0, non_finite=1.0, failed=1.0)


def test_another_reduction_has_another_mark():
    mine, other = write_trailer([], 21, Signals(1.0)), write_trailer([], 28, Signals(1.0))
    same = summed(mine, mine)
    assert same.is_marked(21, 2)
    assert not same.is_marked(22, 2)
    assert not same.is_marked(21, 3)
    assert not summed(mine, other).is_marked(21, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_usual_tails_are_those_of_workers_that_have_nothing_else_to_say(dtype):
    for mark in (3, 11, 15):
        for weight in (8.0, 2.5):
            own = torch.frombuffer(
                bytearray(usual_trailer(2, dtype, mark, 1, weight)), dtype=dtype
            )
            assert own.tolist() == write_trailer([1.0, 1.0], mark, Signals(weight))
            both = own + torch.tensor(write_trailer([1.0, 1.0], mark, Signals(4.0)), dtype=dtype)
            arrived = both.numpy().tobytes()
            assert arrived == usual_trailer(2, dtype, mark, 2, weight + 4.0)
            assert arrived != usual_trailer(2, dtype, (mark + 1) % 16, 2, weight + 4.0)
            assert arrived != usual_trailer(2, dtype, mark, 2, weight)
