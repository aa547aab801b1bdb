"""nccl.py, [Note: Two bytes]: half types travel as they are, and are rounded once."""

import pytest
import torch

import mirror
from mirror import comm
from mirror.errors import BackendError
from tests.comm.nccl.failing import assert_the_next_one_works
from tests.pairs import pairwise

HALVES = (torch.bfloat16, torch.float16)


def values(n, size, dtype):
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(n)]


def sent_by(fake, collective, *args, **options):
    before = fake.sent
    collective(*args, **options)
    return fake.sent - before


@pairwise(dtype=HALVES, n=[1, 2, 3, 8], size=[1, 7, 24, 1001])
def test_an_element_of_a_half_type_is_sent_in_two_bytes(fake, dtype, n, size):
    # 2 (n - 1) / n elements per element and replica: the least that an all-reduce sends.
    communicator = fake.communicator(n)
    tensors = values(n, size, dtype)
    for op in ("sum", "max"):
        assert sent_by(fake, communicator.all_reduce, tensors, op) == 2 * (n - 1) * size * 2
    assert sent_by(fake, communicator.reduce_scatter, tensors) == (n - 1) * size * 2
    assert fake.calls("ncclAllReduce") == fake.calls("ncclReduce") == 0
    wide = [tensor.float() for tensor in tensors]
    assert sent_by(fake, communicator.all_reduce, wide) == 2 * (n - 1) * size * 4
    communicator.close()


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_result_has_the_bits_of_naive(fake, dtype, op):
    communicator, naive = fake.communicator(3), comm.create("naive", ["cpu"] * 3)
    for size in (1, 2, 1001):
        for scale in (1.0, 1 / 3):
            tensors = values(3, size, dtype)
            expected = [tensor.clone() for tensor in tensors]
            communicator.all_reduce(tensors, op, scale)
            naive.all_reduce(expected, op, scale)
            assert all(map(torch.equal, tensors, expected))
    communicator.close()


def test_gradients_sent_as_bfloat16_are_half_the_bytes(fake):
    communicator = fake.communicator(4)
    columns = [[torch.randn(10, 6), torch.randn(8)] for _ in range(4)]
    copies = [[tensor.clone() for tensor in column] for column in columns]
    wanted = sum(column[1].bfloat16().float() for column in columns).bfloat16().float()
    reduce = communicator.all_reduce_checked
    assert sent_by(fake, reduce, copies, "sum", 1.0, 2**20) == 2 * 3 * 68 * 4
    assert sent_by(fake, reduce, columns, "sum", 1.0, 2**20, torch.bfloat16) == 2 * 3 * 68 * 2
    assert all(torch.equal(column[1], wanted) for column in columns)  # rounded once
    communicator.close()


def test_a_training_that_sends_bfloat16_sends_half(fake):
    sent = []
    for wire_dtype in (None, torch.bfloat16):
        options = mirror.CommunicationOptions(wire_dtype=wire_dtype)
        communicator = fake.communicator(2)
        with mirror.MirroredStrategy(
            ["cpu"] * 2, communicator, communication_options=options
        ) as strategy:
            torch.manual_seed(0)
            model = strategy.mirror(torch.nn.Linear(30, 20))
            model(torch.ones(4, 30)).sum().backward()
            before = fake.sent
            model(torch.ones(4, 30)).sum().backward()
            sent.append(fake.sent - before)
    num_bytes = 2 * (2 - 1) * (30 * 20 + 20) * 4
    assert sent == [num_bytes, num_bytes // 2]


@pytest.mark.parametrize("number", [1, 6])
@pytest.mark.parametrize("function", ["ncclSend", "ncclRecv", "ncclAllGather"])
def test_a_message_that_fails_is_an_error_and_all_is_freed(fake, function, number):
    communicator = fake.communicator(3, timeout_seconds=20)
    fake.fail(function, min(number, 3) if function == "ncclAllGather" else number)
    with pytest.raises(BackendError, match=r"failed at all_reduce of 6 bfloat16 .* on order"):
        communicator.all_reduce(values(3, 6, torch.bfloat16))
    assert_the_next_one_works(fake)


def test_a_message_that_nobody_awaits_is_an_error(fake):
    communicator = fake.communicator(2, timeout_seconds=20)
    address = torch.ones(4).data_ptr()
    calls = [(i, "ncclSend", (address, 4, 1, 1 - i)) for i in range(2)]
    with pytest.raises(BackendError, match="nobody awaits"):
        communicator._clique.run("a mistake", calls)
