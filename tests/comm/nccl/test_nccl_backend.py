"""The NCCL backend on a fake libnccl: results, cost, and half types."""

import gc
import threading

import pytest
import torch

import mirror
from mirror import comm
from mirror.comm.nccl import clique, nccl_backend
from mirror.comm.nccl.nccl_backend import NcclCommunicator, shared_gpu_reason
from mirror.errors import BackendError, CollectiveTimeoutError
from tests.comm.nccl.fake_nccl import (
    FUNCTIONS,
    TIMEOUT,
    Promptly,
    assert_the_next_one_works,
    assert_works,
    tensors,
)
from tests.oracle import assert_same_training, train_loop
from tests.pairs import pairwise

# what is called


def test_a_collective_is_one_group_of_one_call_per_replica(fake):
    communicator = fake.communicator(4)
    for name, function in FUNCTIONS.items():
        groups = fake.calls("ncclGroupStart")
        getattr(communicator, name)(tensors(4, 8))
        assert fake.calls(function) == 4
        assert fake.calls("ncclGroupStart") == groups + 1
    communicator.close()


def test_chunks_of_unequal_size_are_reduced_and_broadcast_one_by_one(fake):
    communicator = fake.communicator(3)
    values = [torch.arange(5.0) + i for i in range(3)]
    communicator.reduce_scatter(values)
    communicator.all_gather(values)
    assert values[2].tolist() == [3, 6, 9, 12, 15]
    assert (fake.calls("ncclReduce"), fake.calls("ncclReduceScatter")) == (9, 0)
    assert (fake.calls("ncclBroadcast"), fake.calls("ncclAllGather")) == (9, 0)
    communicator.all_gather([torch.ones(1) for _ in range(3)])  # two chunks are empty
    assert fake.calls("ncclBroadcast") == 12
    communicator.close()


@pytest.mark.parametrize("n", [1, 2, 8])
def test_what_is_in_progress_is_waited_for(fake, n):
    fake.polls(5)
    communicator = fake.communicator(n)
    values = tensors(n)
    communicator.all_reduce(values)
    assert values[-1].tolist() == [n * (n - 1) / 2] * 6
    assert fake.calls("ncclCommGetAsyncError") >= 10
    communicator.close()


def test_closing_finalizes_and_destroys(fake):
    fake.polls(3)
    communicator = fake.communicator(3)
    communicator.close()
    communicator.close()
    assert fake.calls("ncclCommFinalize") == fake.calls("ncclCommDestroy") == 3
    assert fake.calls("ncclCommAbort") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_min_and_max_keep_every_value_and_nan(fake, dtype):
    communicator = fake.communicator(2)
    info = torch.finfo(dtype)
    rest = [torch.inf, -torch.inf, info.max, info.min, info.tiny, -info.tiny, 0.0, -1.5, torch.nan]
    for op, combine in (("max", torch.maximum), ("min", torch.minimum)):
        one = torch.tensor(rest, dtype=dtype)
        for shift in range(len(rest)):
            other = one.roll(shift)
            values = [one.clone(), other.clone()]
            communicator.all_reduce(values, op)
            for value in values:
                assert torch.equal(value.nan_to_num(7), combine(one, other).nan_to_num(7))
                assert torch.equal(value.isnan(), combine(one, other).isnan())
    communicator.close()


def test_threads_take_turns(fake):
    fake.polls(2)
    communicator = fake.communicator(2)
    results = []

    def reduce():
        for _ in range(20):
            values = tensors(2)
            communicator.all_reduce(values)
            results.append(values[0].tolist() == [1.0] * 6)

    threads = [threading.Thread(target=reduce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80
    communicator.close()


# how else it may end


def test_a_communicator_that_is_dropped_is_ended(fake):
    communicator = fake.communicator()
    assert_works(communicator)
    del communicator
    gc.collect()
    fake.assert_nothing_is_left()
    assert fake.calls("ncclCommDestroy") == 3


@pytest.mark.parametrize("goes_on", [False, True])
def test_ctrl_c_aborts_and_stays_ctrl_c(fake, monkeypatch, goes_on):
    communicator = fake.communicator()
    fake.polls(5)

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(clique, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        communicator.all_reduce(tensors())
    fake.assert_nothing_is_left()
    if goes_on:
        with pytest.raises(BackendError, match="a KeyboardInterrupt broke it off"):
            communicator.all_reduce(tensors())
    communicator.close()  # says nothing that would hide the interrupt


def test_a_closed_communicator_has_no_thread(fake):
    before = threading.active_count()
    communicator = fake.communicator()
    assert threading.active_count() == before + 1
    communicator.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_bad_timeout_is_refused(fake, seconds):
    with pytest.raises(ValueError, match="timeout_seconds must be a number >= 0"):
        fake.communicator(timeout_seconds=seconds)


def test_an_infinite_timeout_is_one(fake):
    communicator = fake.communicator(timeout_seconds=float("inf"))
    assert_works(communicator)
    communicator.close()


# a strategy on it


def model_and_optimizer():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(model, batch):
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


def batches():
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(7, 5, generator=generator), torch.randn(7, 2, generator=generator))
        for _ in range(5)
    ]


def test_a_strategy_trains_as_one_device_does(fake):
    fake.polls(1)
    plain, plain_optimizer = model_and_optimizer()
    train_loop(plain, plain_optimizer, batches(), loss_of)
    with mirror.MirroredStrategy(["cpu"] * 3, backend=fake.communicator(3)) as strategy:
        assert strategy.backend == "nccl"
        with strategy.scope():
            model, optimizer = model_and_optimizer()
            train_loop(model, optimizer, batches(), loss_of)
        strategy.check_replicas()
        assert fake.calls("ncclAllReduce") >= 5 * 3
        assert_same_training(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("fault", ["absent", "fail", "poison"])
def test_a_strategy_that_failed_can_be_closed_and_another_one_made(fake, fault):
    error = CollectiveTimeoutError if fault == "absent" else BackendError
    strategy = mirror.MirroredStrategy(
        ["cpu"] * 3, backend=fake.communicator(3, timeout_seconds=TIMEOUT)
    )

    def step():
        context = mirror.get_replica_context()
        return context.all_reduce("sum", torch.ones(2))

    assert strategy.local_results(strategy.run(step))[0].tolist() == [3, 3]
    if fault == "fail":
        fake.fail("ncclAllReduce", 2)
    else:
        getattr(fake, fault)(2)
    with Promptly(), pytest.raises(error):
        strategy.run(step)
    strategy.close()
    fake.assert_nothing_is_left()
    fake.c.fake_reset()
    with mirror.MirroredStrategy(["cpu"] * 3, backend=fake.communicator(3)) as strategy:
        assert strategy.local_results(strategy.run(step))[2].tolist() == [3, 3]


# where it can serve


def test_it_serves_gpus_only():
    with pytest.raises(BackendError, match="'nccl' cannot serve cpu, cpu: NCCL serves GPUs only"):
        comm.create("nccl", ["cpu"] * 2)
    with pytest.raises(BackendError, match="GPUs only"):
        NcclCommunicator(["cpu"])


CUDA = [torch.device("cuda", i) for i in range(2)]


@pytest.mark.parametrize(
    ("variable", "words"),
    [("CUDA_LAUNCH_BLOCKING", "waits for the"), ("NCCL_COMM_BLOCKING", "unset it")],
)
def test_variables_that_make_it_hang_are_a_reason(monkeypatch, variable, words):
    monkeypatch.setattr(nccl_backend.libnccl, "nccl_missing_reason", lambda: None)
    assert NcclCommunicator.unavailable_reason(CUDA) is None
    monkeypatch.setenv(variable, "1")
    assert words in NcclCommunicator.unavailable_reason(CUDA)


def test_a_missing_library_is_a_reason(monkeypatch):
    monkeypatch.setattr(nccl_backend.libnccl, "nccl_missing_reason", lambda: "there is no libnccl")
    assert NcclCommunicator.unavailable_reason(CUDA) == "there is no libnccl"


def test_several_replicas_on_one_gpu_need_a_new_nccl_and_a_variable():
    assert "NCCL 2.28.9 refuses" in shared_gpu_reason(22809, None)
    assert "NCCL 2.29.7 refuses" in shared_gpu_reason(22907, "1")
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in shared_gpu_reason(23007, None)
    assert shared_gpu_reason(23007, "1") is None


def test_one_gpu_twice_asks_the_library_for_its_version(fake, monkeypatch):
    monkeypatch.setattr(nccl_backend.libnccl, "nccl_missing_reason", lambda: None)
    monkeypatch.setattr(nccl_backend.libnccl, "nccl_library", lambda: fake.library)
    assert "refuses" in NcclCommunicator.unavailable_reason(CUDA[:1] * 2)


@pytest.mark.parametrize("collective", FUNCTIONS)
def test_autograd_knows_that_tensors_were_written_to(fake, collective):
    communicator = fake.communicator(2)
    values = [torch.ones(4, requires_grad=True) * 2 for _ in range(2)]
    loss = sum(value.square().sum() for value in values)
    with torch.no_grad():
        getattr(communicator, collective)(values)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    communicator.close()


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


def test_a_message_without_a_receiver_is_an_error(fake):
    communicator = fake.communicator(2, timeout_seconds=20)
    address = torch.ones(4).data_ptr()
    calls = [(i, "ncclSend", (address, 4, 1, 1 - i)) for i in range(2)]
    with pytest.raises(BackendError, match="no rank receives"):
        communicator._clique.run("a mistake", calls)
