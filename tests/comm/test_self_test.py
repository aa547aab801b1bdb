"""mirror/comm/self_test.py: right backends pass, and what is wrong is found and told."""

from itertools import product

import pytest
import torch

from mirror import comm
from mirror.comm import self_test
from mirror.comm.communicator import DTYPES, OPS
from mirror.comm.host.naive_backend import NaiveCommunicator
from mirror.errors import BackendError, CollectiveTimeoutError
from tests.gpu.fake import FakeGpus

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("name", comm.available(["cpu"]))
def test_every_backend_passes(name, n):
    communicator = comm.create(name, ["cpu"] * n)
    assert self_test.examine(communicator) >= 100
    communicator.close()


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_nccl_passes(fake, n):
    communicator = fake.communicator(n)
    self_test.examine(communicator)
    communicator.close()


def test_it_does_not_depend_on_the_default_device_nor_on_inference_mode():
    with torch.device("meta"), torch.inference_mode():
        self_test.examine(NaiveCommunicator(["cpu"] * 2))


def test_sixteen_replicas_stay_exact():
    self_test.examine(NaiveCommunicator(["cpu"] * 16))


def test_a_wrong_bit_at_the_end_of_a_large_message_is_found(fake):
    communicator = fake.communicator(2)
    fake.c.fake_spoil(4 * 262_147 - 3)
    with pytest.raises(
        BackendError,
        match=r"replica 0 \(cpu\) got .* at 262146 in all_reduce\('sum'\) of 262147 torch.float32",
    ):
        self_test.examine(communicator)
    communicator.close()


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_a_collective_that_does_nothing_is_found(collective):
    class Broken(NaiveCommunicator):
        pass

    setattr(Broken, collective, lambda self, tensors, *args, **kwargs: None)
    with pytest.raises(BackendError, match=rf"got .* instead of .* {collective}"):
        self_test.examine(Broken(["cpu"] * 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8])
def test_one_dtype_that_is_wrong_is_found(dtype):
    class Broken(NaiveCommunicator):
        def all_reduce(self, tensors, op="sum", scale=1.0):
            super().all_reduce(tensors, op, scale)
            if tensors[-1].dtype == dtype and len(tensors[-1]) > 1:
                tensors[-1][-1] += 1

    with pytest.raises(BackendError, match=rf"replica 2 .* {dtype}"):
        self_test.examine(Broken(["cpu"] * 3))


def test_a_wait_in_vain_is_a_better_reason_than_wrong_data():
    class Late(NaiveCommunicator):
        """As on a GPU, where the collective after it says that one has timed out."""

        def all_reduce(self, tensors, op="sum", scale=1.0):
            if len(tensors[0]) == 1:
                raise CollectiveTimeoutError("replica 1 waited for replica 0")

    with pytest.raises(CollectiveTimeoutError, match="waited for"):
        self_test.examine(Late(["cpu"] * 2))


def test_a_failure_is_a_reason_and_found_once():
    made = []

    class Broken(NaiveCommunicator):
        def __init__(self, devices):
            made.append(self)
            super().__init__(devices)

        def broadcast(self, tensors, root=0):
            raise OSError("no link")

    for _ in range(2):
        reason = self_test.failure(Broken, [CPU, CPU])
        assert reason == "its self-test on these devices failed: OSError: no link"
    assert len(made) == 1
    assert made[0]._closed


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_failure_after_which_cuda_is_lost_says_so(monkeypatch, is_lost):
    # An illegal address, say: whatever is tried afterwards fails in this process.
    class Broken(NaiveCommunicator):
        def all_reduce(self, tensors, op="sum", scale=1.0):
            if is_lost:
                monkeypatch.setattr(self_test, "synchronize", self.refuse)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def refuse(self, device):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with FakeGpus(2) as gpus:
        reason = self_test.trial(Broken(gpus.devices))
    assert "illegal memory access" in reason
    assert ("start it anew, with another backend" in reason) == is_lost


def test_those_that_wait_get_a_short_timeout():
    class Waiting(NaiveCommunicator):
        waits = True

        def __init__(self, devices, *, timeout_seconds):
            assert timeout_seconds <= 60
            super().__init__(devices)

    assert self_test.failure(Waiting, [CPU]) is None


def test_a_trial_prepares_and_takes_one_reduction_of_each_kind():
    # Each one is a compilation of kernels; whoever examines takes them all.
    log = []

    class Kernels(NaiveCommunicator):
        def prepare(self, reductions):
            log.append(tuple(reductions))

        def all_reduce(self, tensors, op="sum", scale=1.0):
            log.append((op, tensors[0].dtype))
            super().all_reduce(tensors, op, scale)

    assert self_test.trial(Kernels(["cpu"] * 2)) is None
    assert log[0] == self_test.TRIED
    assert set(log[1:]) == set(self_test.TRIED)
    log.clear()
    assert self_test.trial(Kernels(["cpu"] * 2)) is None
    assert log == []
    self_test.examine(Kernels(["cpu"] * 2))
    assert set(log) == set(product(OPS, DTYPES))
