"""nccl.py and clique.py on a libnccl that fails on order; real NCCL needs GPUs."""

import gc
import threading
import time

import pytest
import torch

import mirror
from mirror import comm
from mirror.comm.nccl import clique, nccl
from mirror.comm.nccl.nccl import NcclCommunicator, shared_gpu_reason
from mirror.errors import BackendError, CollectiveTimeoutError
from tests.oracle import assert_same_training, train_loop

TIMEOUT = 0.5
FUNCTIONS = {
    "all_reduce": "ncclAllReduce",
    "broadcast": "ncclBroadcast",
    "reduce_scatter": "ncclReduceScatter",
    "all_gather": "ncclAllGather",
}


def tensors(n=3, count=6):
    return [torch.full((count,), float(i)) for i in range(n)]


def assert_works(communicator):
    values = tensors(len(communicator.devices))
    communicator.all_reduce(values)
    assert values[0].tolist() == [3.0] * 6


def assert_the_next_one_works(fake):
    fake.c.fake_reset()
    with_next = fake.communicator()
    assert_works(with_next)
    with_next.close()


class Promptly:
    """Asserts that what is in it ends within the timeout and a second."""

    def __init__(self, timeout=TIMEOUT):
        self.timeout = timeout

    def __enter__(self):
        self.start = time.monotonic()

    def __exit__(self, *exception):
        assert time.monotonic() - self.start < self.timeout + 1


# ------------------------------------------------------------------ what is called


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


# ------------------------------------------------------------------ calls that fail


@pytest.mark.parametrize("result", [1, 2, 3, 4, 5, 6, 8], ids=str)
def test_errors_have_their_names(fake, result):
    fake.fail("ncclGetUniqueId", 1, result)
    with pytest.raises(BackendError, match=nccl.libnccl.RESULTS[result]):
        fake.communicator()


@pytest.mark.parametrize(
    ("function", "number"),
    [
        ("ncclGetUniqueId", 1),
        ("ncclGroupStart", 1),
        ("ncclCommInitRankConfig", 1),
        ("ncclCommInitRankConfig", 2),
        ("ncclCommInitRankConfig", 3),
        ("ncclGroupEnd", 1),
        ("ncclCommGetAsyncError", 1),
        ("ncclCommGetAsyncError", 3),
    ],
)
def test_a_call_that_fails_while_communicators_are_made_is_an_error(
    fake,
    function,
    number,
):
    fake.polls(2)
    fake.fail(function, number)
    with pytest.raises(
        BackendError,
        match=f"NCCL 2.28.9 failed at making its communicators on cpu, cpu, cpu: {function} "
        r"returned ncclSystemError \(some error: a fault on order\)",
    ):
        fake.communicator()
    fake.assert_nothing_is_left()
    assert_the_next_one_works(fake)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("collective", FUNCTIONS)
def test_a_collective_that_fails_on_any_replica_is_an_error(
    fake,
    collective,
    number,
):
    communicator = fake.communicator()
    fake.fail(FUNCTIONS[collective], number)
    with pytest.raises(BackendError, match=f"failed at {collective} of 6 float32 .* on order"):
        getattr(communicator, collective)(tensors())
    assert fake.calls("ncclCommAbort") == 3
    fake.assert_nothing_is_left()
    with pytest.raises(BackendError, match="make another strategy"):  # and says so again
        communicator.all_reduce(tensors())
    communicator.close()  # whoever closes it has been told
    assert_the_next_one_works(fake)


@pytest.mark.parametrize("function", ["ncclGroupStart", "ncclGroupEnd", "ncclCommGetAsyncError"])
def test_a_group_that_fails_is_an_error(fake, function):
    communicator = fake.communicator()
    fake.polls(2)
    fake.fail(function)
    with pytest.raises(BackendError, match=f"{function} returned ncclSystemError"):
        communicator.all_reduce(tensors())
    fake.assert_nothing_is_left()
    assert_the_next_one_works(fake)


@pytest.mark.parametrize(
    "function",
    ["ncclGroupStart", "ncclCommFinalize", "ncclGroupEnd", "ncclCommDestroy"],
)
def test_a_call_that_fails_at_closing_is_an_error_and_all_is_freed(
    fake,
    function,
):
    communicator = fake.communicator()
    fake.fail(function)
    with pytest.raises(BackendError, match=f"ending its communicators .* {function} returned"):
        communicator.close()
    fake.assert_nothing_is_left()
    communicator.close()
    assert_the_next_one_works(fake)


def test_an_abort_that_fails_leaves_the_first_error(fake):
    communicator = fake.communicator()
    fake.fail("ncclAllReduce")
    fake.fail("ncclCommAbort", 1)
    fake.fail("ncclCommAbort", 2)
    with pytest.raises(BackendError, match="ncclAllReduce returned"):
        communicator.all_reduce(tensors())
    assert fake.calls("ncclCommAbort") == 3


@pytest.mark.parametrize("polls", [0, 4])
def test_an_asynchronous_error_is_an_error(fake, polls):
    fake.polls(polls)
    fake.poison(6)
    with pytest.raises(BackendError, match="replica 0 came to ncclRemoteError"):
        fake.communicator()
    communicator = fake.communicator()
    fake.poison(1)
    with pytest.raises(BackendError, match="came to ncclUnhandledCudaError"):
        communicator.broadcast(tensors())
    communicator = fake.communicator()
    fake.poison(3)
    with pytest.raises(BackendError, match=r"ending .* came to ncclInternalError"):
        communicator.close()
    assert_the_next_one_works(fake)


def test_ranks_whose_calls_differ_are_an_error(fake):
    communicator = fake.communicator(2)
    pointers = [tensor.data_ptr() for tensor in tensors(2)]
    calls = [(i, "ncclAllReduce", (pointers[i], pointers[i], 6 - i, 7, 0)) for i in range(2)]
    with pytest.raises(BackendError, match="ranks differ in arguments"):
        communicator._clique.run("a mistake", calls)


# ------------------------------------------------------------------ calls that do not end


def test_communicators_that_stay_in_progress_time_out(fake):
    fake.stall("ncclCommInitRankConfig")
    with Promptly(), pytest.raises(CollectiveTimeoutError, match=r"within 0\.5 s; making its"):
        fake.communicator(timeout_seconds=TIMEOUT)
    assert_the_next_one_works(fake)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_peer_that_never_joins_times_out(fake, rank):
    fake.absent(rank)
    with Promptly(), pytest.raises(CollectiveTimeoutError, match="still in progress"):
        fake.communicator(timeout_seconds=TIMEOUT)
    fake.absent(-1)
    communicator = fake.communicator(timeout_seconds=TIMEOUT)
    fake.absent(rank)
    with (
        Promptly(),
        pytest.raises(
            CollectiveTimeoutError,
            match=r"all_reduce of 6 float32 on cpu, cpu, cpu was not: replica",
        ),
    ):
        communicator.all_reduce(tensors())
    fake.assert_nothing_is_left()
    with pytest.raises(CollectiveTimeoutError):
        communicator.all_reduce(tensors())
    assert_the_next_one_works(fake)


@pytest.mark.parametrize("collective", FUNCTIONS)
def test_collectives_that_stay_in_progress_time_out(fake, collective):
    communicator = fake.communicator(timeout_seconds=TIMEOUT)
    fake.stall(FUNCTIONS[collective])
    with Promptly(), pytest.raises(CollectiveTimeoutError, match=f"{collective} of 6 float32"):
        getattr(communicator, collective)(tensors())
    assert_the_next_one_works(fake)


def test_closing_that_stays_in_progress_times_out(fake):
    communicator = fake.communicator(timeout_seconds=TIMEOUT)
    fake.stall("ncclCommFinalize")
    with Promptly(), pytest.raises(CollectiveTimeoutError, match="ending its communicators"):
        communicator.close()
    assert_the_next_one_works(fake)


def test_a_timeout_of_zero_is_for_what_is_not_done_at_once(fake):
    communicator = fake.communicator(timeout_seconds=0)
    assert_works(communicator)
    fake.polls(1000)
    with Promptly(0), pytest.raises(CollectiveTimeoutError, match="within 0 s"):
        communicator.all_reduce(tensors())


@pytest.mark.parametrize("function", ["ncclCommInitRankConfig", "ncclGroupEnd"])
def test_a_call_that_does_not_return_while_communicators_are_made_times_out(fake, function):
    def make():
        fake.hang(function, 2 if function == "ncclCommInitRankConfig" else 1)
        with Promptly(), pytest.raises(CollectiveTimeoutError, match="a call does not return"):
            fake.communicator(timeout_seconds=TIMEOUT)

    # The group of a thread that hung inside it stays open: to be seen in no other test.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    fake.assert_nothing_is_left()
    assert_the_next_one_works(fake)


@pytest.mark.parametrize("function", ["ncclGroupEnd", "ncclCommGetAsyncError"])
def test_a_call_that_does_not_return_times_out(fake, function):
    communicator = fake.communicator(timeout_seconds=TIMEOUT)
    fake.polls(1)
    fake.hang(function)
    with Promptly(), pytest.raises(CollectiveTimeoutError, match="a call does not return"):
        communicator.all_reduce(tensors())
    assert_the_next_one_works(fake)


def test_a_destroy_that_does_not_return_times_out(fake):
    communicator = fake.communicator(timeout_seconds=TIMEOUT)
    fake.hang("ncclCommDestroy", 2)
    with Promptly(), pytest.raises(CollectiveTimeoutError, match="ncclCommDestroy does not"):
        communicator.close()
    other = fake.communicator(2)
    fake.fail("ncclAllReduce")
    with pytest.raises(BackendError):
        other.all_reduce(tensors(2))  # the abort lets the other one's thread go on


def test_an_abort_that_does_not_return_is_not_waited_for(fake):
    communicator = fake.communicator(timeout_seconds=TIMEOUT)
    fake.absent(1)
    fake.hang("ncclCommAbort", 1)
    with Promptly(), pytest.raises(CollectiveTimeoutError):
        communicator.all_reduce(tensors())
    fake.absent(-1)
    other = fake.communicator(2)
    fake.fail("ncclAllReduce")
    with pytest.raises(BackendError):
        other.all_reduce(tensors(2))  # its abort releases the first one


# ------------------------------------------------------------------ what has been enqueued


class Devices:
    """Stands for the devices' streams: events that come when the test says so."""

    def __init__(self, monkeypatch, fake):
        self.done = False
        self.seen = threading.Event()  # that they are done, by the thread that watches
        self.fake = fake
        self.begun = fake.calls("ncclCommAbort")
        monkeypatch.setattr(clique, "record_event", lambda device: self)

    def query(self):
        if self.done:
            self.seen.set()
        # As on a GPU: an abort ends the kernels.
        return self.done or self.fake.calls("ncclCommAbort") > self.begun


def assert_given_up(communicator):
    """The thread that watches ends with what it watches over."""
    with Promptly():
        communicator._clique._watcher.join(5)


def test_a_collective_that_hangs_on_the_devices_is_aborted_and_the_next_call_says_so(
    fake,
    monkeypatch,
):
    communicator = fake.communicator(timeout_seconds=TIMEOUT)
    Devices(monkeypatch, fake)
    communicator.all_reduce(tensors())  # enqueued
    assert_given_up(communicator)
    fake.assert_nothing_is_left()
    with pytest.raises(CollectiveTimeoutError, match=r"not done: replica 0 \(cpu\), replica 1"):
        communicator.broadcast(tensors())
    communicator.close()
    monkeypatch.undo()
    assert_the_next_one_works(fake)


def test_closing_tells_what_nobody_has_been_told(fake, monkeypatch):
    communicator = fake.communicator(timeout_seconds=TIMEOUT)
    Devices(monkeypatch, fake)
    communicator.all_reduce(tensors())
    assert_given_up(communicator)
    with pytest.raises(CollectiveTimeoutError):
        communicator.close()
    communicator.close()


def test_an_error_behind_an_enqueued_collective_is_found(fake, monkeypatch):
    communicator = fake.communicator(timeout_seconds=60)
    Devices(monkeypatch, fake)
    communicator.all_reduce(tensors())
    fake.fail("ncclCommGetAsyncError", 2, 6)
    assert_given_up(communicator)
    with pytest.raises(BackendError, match=r"all_reduce of 6 float32 .* ncclRemoteError"):
        communicator.all_reduce(tensors())


def test_an_error_of_cuda_is_found(fake, monkeypatch):
    communicator = fake.communicator(timeout_seconds=60)
    devices = Devices(monkeypatch, fake)
    communicator.all_reduce(tensors())

    def query():
        raise RuntimeError("CUDA error: an illegal memory access")

    devices.query = query
    assert_given_up(communicator)
    with pytest.raises(BackendError, match="illegal memory access"):
        communicator.all_reduce(tensors())


def test_devices_that_get_done_in_time_are_fine(fake, monkeypatch):
    communicator = fake.communicator(timeout_seconds=60)
    for _ in range(3):
        devices = Devices(monkeypatch, fake)
        communicator.all_reduce(tensors())
        communicator.broadcast(tensors())
        devices.done = True
        assert devices.seen.wait(5)
    monkeypatch.undo()
    assert_works(communicator)
    communicator.close()


# ------------------------------------------------------------------ how else it may end


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
    with pytest.raises(ValueError, match="timeout_seconds must be at least 0"):
        fake.communicator(timeout_seconds=seconds)


def test_an_infinite_timeout_is_one(fake):
    communicator = fake.communicator(timeout_seconds=float("inf"))
    assert_works(communicator)
    communicator.close()


# ------------------------------------------------------------------ a strategy on it


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


# ------------------------------------------------------------------ where it can serve


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
    monkeypatch.setattr(nccl.libnccl, "missing_reason", lambda: None)
    assert NcclCommunicator.unavailable_reason(CUDA) is None
    monkeypatch.setenv(variable, "1")
    assert words in NcclCommunicator.unavailable_reason(CUDA)


def test_a_missing_library_is_a_reason(monkeypatch):
    monkeypatch.setattr(nccl.libnccl, "missing_reason", lambda: "there is no libnccl")
    assert NcclCommunicator.unavailable_reason(CUDA) == "there is no libnccl"


def test_several_replicas_on_one_gpu_need_a_new_nccl_and_a_variable():
    assert "NCCL 2.28.9 refuses" in shared_gpu_reason(22809, None)
    assert "NCCL 2.29.7 refuses" in shared_gpu_reason(22907, "1")
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in shared_gpu_reason(23007, None)
    assert shared_gpu_reason(23007, "1") is None


def test_one_gpu_twice_asks_the_library_for_its_version(fake, monkeypatch):
    monkeypatch.setattr(nccl.libnccl, "missing_reason", lambda: None)
    monkeypatch.setattr(nccl.libnccl, "library", lambda: fake.library)
    assert "refuses" in NcclCommunicator.unavailable_reason(CUDA[:1] * 2)
