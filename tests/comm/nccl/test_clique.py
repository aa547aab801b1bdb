"""Cliques: made, used, aborted, and calls of libnccl that fail."""

import threading

import pytest

from mirror.comm import collective_lock
from mirror.comm.nccl import clique, nccl_backend
from mirror.errors import BackendError, CollectiveTimeoutError
from tests.comm.nccl.fake_nccl import (
    FUNCTIONS,
    TIMEOUT,
    Promptly,
    assert_the_next_one_works,
    assert_works,
    tensors,
)

# calls that do not end


def test_communicators_that_stay_in_progress_time_out(fake):
    fake.stall("ncclCommInitRankConfig")
    with Promptly(), pytest.raises(CollectiveTimeoutError, match=r"within 0\.5 s; making its"):
        fake.communicator(init_seconds=TIMEOUT)
    assert_the_next_one_works(fake)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_peer_that_never_joins_times_out(fake, rank):
    fake.absent(rank)
    with Promptly(), pytest.raises(CollectiveTimeoutError, match="still in progress"):
        fake.communicator(init_seconds=TIMEOUT)
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


def test_making_communicators_has_a_deadline_of_its_own(fake):
    # To load the kernels on 8 GPUs took NCCL 55 s; a collective takes no second.
    fake.polls(20)
    communicator = fake.communicator(timeout_seconds=0)
    fake.polls(0)
    with communicator.setting_timeout(60):
        assert_works(communicator)
        communicator.close()
    assert nccl_backend._INIT_SECONDS >= 300


def test_a_deadline_can_be_another_one_for_a_while(fake):
    communicator = fake.communicator(timeout_seconds=60)
    with communicator.setting_timeout(0.1):
        assert_works(communicator)
    assert communicator._clique.timeout_seconds == 60
    fake.stall("ncclBroadcast")
    with (
        Promptly(0.1),
        pytest.raises(CollectiveTimeoutError, match=r"within 0\.1 s"),
        communicator.setting_timeout(0.1),
    ):
        communicator.broadcast(tensors())
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
            fake.communicator(init_seconds=TIMEOUT)

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


# what has been enqueued


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
        communicator._clique._watchdog.join(60)


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


def test_closing_raises_the_errors_not_yet_raised(fake, monkeypatch):
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
        assert devices.seen.wait(60)
    monkeypatch.undo()
    assert_works(communicator)
    communicator.close()


def test_the_thread_that_watches_spoils_no_capture(fake, monkeypatch):
    names = []
    monkeypatch.setattr(
        clique,
        "query_without_breaking_capture",
        lambda: names.append(threading.current_thread().name),
    )
    fake.communicator().close()
    assert names == ["mirror-nccl"]


def test_an_abort_from_another_thread_raises_in_the_next_call(fake, monkeypatch):
    communicator = fake.communicator(timeout_seconds=60)
    Devices(monkeypatch, fake)
    communicator.all_reduce(tensors())
    communicator.abort()
    fake.assert_nothing_is_left()
    with pytest.raises(BackendError, match=r"all_reduce of 6 float32 .* was told to abort"):
        communicator.all_reduce(tensors())
    communicator.close()


def test_closing_while_an_exception_is_under_way_waits_for_seconds_only(fake, monkeypatch):
    monkeypatch.setattr(collective_lock, "PATIENCE_SECONDS", 0.1)
    communicator = fake.communicator(timeout_seconds=600)
    Devices(monkeypatch, fake)
    communicator.all_reduce(tensors())
    with Promptly(0.1), pytest.raises(KeyboardInterrupt):  # and nothing that hides it
        try:
            raise KeyboardInterrupt
        finally:
            communicator.close()
    assert fake.calls("ncclCommAbort") == 3


@pytest.mark.parametrize("result", [1, 2, 3, 4, 5, 6, 8], ids=str)
def test_errors_have_their_names(fake, result):
    fake.fail("ncclGetUniqueId", 1, result)
    with pytest.raises(BackendError, match=nccl_backend.libnccl.RESULTS[result]):
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
    communicator.close()  # its owner knows that it has failed
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


def test_ranks_with_different_calls_are_an_error(fake):
    communicator = fake.communicator(2)
    pointers = [tensor.data_ptr() for tensor in tensors(2)]
    calls = [(i, "ncclAllReduce", (pointers[i], pointers[i], 6 - i, 7, 0)) for i in range(2)]
    with pytest.raises(BackendError, match="ranks differ in arguments"):
        communicator._clique.run("a mistake", calls)


class Size:
    """What the system says of /dev/shm."""

    def __init__(self, megabytes):
        self.f_blocks, self.f_frsize = megabytes << 8, 4096


@pytest.mark.parametrize(
    ("megabytes", "result", "is_told"), [(64, 2, True), (64, 5, False), (2048, 2, False)]
)
def test_little_shared_memory_is_named_where_it_may_be_the_reason(
    fake, monkeypatch, megabytes, result, is_told
):
    monkeypatch.setattr(clique.os, "statvfs", lambda path: Size(megabytes))
    communicator = fake.communicator()
    fake.fail("ncclAllReduce", 1, result)
    with pytest.raises(BackendError, match="make another strategy") as error:
        communicator.all_reduce(tensors())
    assert ("/dev/shm has 64 MiB" in str(error.value)) == is_told
    assert ("--shm-size=1g" in str(error.value)) == is_told


def test_a_machine_without_shared_memory_is_no_other_error(fake, monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(clique.os, "statvfs", missing)
    fake.fail("ncclGetUniqueId", 1, 2)
    with pytest.raises(BackendError, match="ncclSystemError"):
        fake.communicator()


def test_the_wait_for_a_slow_launch_of_another_clique_does_not_count(fake):
    slow, waiting = fake.communicator(timeout_seconds=60), fake.communicator(timeout_seconds=0.1)
    launching, settle = threading.Event(), slow._clique._settle

    def settle_late(result):
        launching.set()
        # The watchdog of the waiting one would have timed it out by now.
        threading.Event().wait(0.1 + clique._HANG_SECONDS + 3 * clique._WATCH_SECONDS)
        settle(result)

    slow._clique._settle = settle_late
    thread = threading.Thread(target=slow.all_reduce, args=(tensors(),))
    thread.start()
    assert launching.wait(20)
    waiting.all_reduce(tensors())
    thread.join()
    del slow._clique._settle
    slow.close()
    waiting.close()
