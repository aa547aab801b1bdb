"""Calls of libnccl that fail are errors by name, and all is freed."""

import pytest

from mirror.comm.nccl import communicators, nccl_backend
from mirror.errors import BackendError
from tests.comm.nccl.failing import FUNCTIONS, assert_the_next_one_works, tensors


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
    monkeypatch.setattr(communicators.os, "statvfs", lambda path: Size(megabytes))
    communicator = fake.communicator()
    fake.fail("ncclAllReduce", 1, result)
    with pytest.raises(BackendError, match="make another strategy") as error:
        communicator.all_reduce(tensors())
    assert ("/dev/shm has 64 MiB" in str(error.value)) == is_told
    assert ("--shm-size=1g" in str(error.value)) == is_told


def test_a_machine_without_shared_memory_is_no_other_error(fake, monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(communicators.os, "statvfs", missing)
    fake.fail("ncclGetUniqueId", 1, 2)
    with pytest.raises(BackendError, match="ncclSystemError"):
        fake.communicator()
