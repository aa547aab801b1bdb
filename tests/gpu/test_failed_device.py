"""A GPU that fails: replicas whose collectives wait for it are released, and errors are kept."""

import threading
from types import SimpleNamespace

import pytest
import torch

import mirror
from mirror.comm.host_backends import NaiveCommunicator
from mirror.device import streams
from tests.gpu.fake import FakeGpus


class Driver:
    """CUDA's driver, whose every call for a failed GPU returns an error."""

    def __init__(self):
        self.failed, self.status = set(), 710

    def cuStreamQuery(self, stream):
        return self.status if torch.cuda.current_device() in self.failed else 0

    def cuEventQuery(self, event):
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(streams, "_driver", lambda: driver)
    return driver


@pytest.fixture
def abort(monkeypatch):
    """Records calls of ``abort``; ``abort.called`` is an event."""
    found = SimpleNamespace(called=threading.Event())
    monkeypatch.setattr(NaiveCommunicator, "abort", lambda communicator: found.called.set())
    return found


def run_with_error(error, wait_for, before):
    """Runs a step that fails on replica 1 while replica 0 waits for an event, as for its GPU.

    Returns:
        The error of the run, and whether replica 0 was released.
    """
    released = []

    def step(fails):
        if not fails:
            return
        if mirror.get_replica_context().replica_id_in_sync_group == 0:
            released.append(wait_for.wait(10))
        else:
            before()
            raise error

    gpus = ["cuda:0", "cuda:1"]
    with (
        FakeGpus(2),
        mirror.MirroredStrategy(gpus, backend="naive", schedule="staggered") as strategy,
    ):
        strategy.run(step, args=(False,))  # replicas take turns in their first run
        with pytest.raises(type(error)) as raised:
            strategy.run(step, args=(True,))
    return raised.value, released == [True]


@pytest.mark.parametrize("kind", [RuntimeError, getattr(torch, "AcceleratorError", RuntimeError)])
def test_replicas_that_wait_for_a_failed_gpu_are_released(driver, abort, kind):
    error = kind("CUDA error: device-side assert triggered")
    raised, is_released = run_with_error(error, abort.called, lambda: driver.failed.add(1))
    assert raised is error
    assert is_released


def test_collectives_are_not_aborted_after_an_error_that_leaves_the_gpus_usable(driver, abort):
    failing = threading.Event()
    error = torch.OutOfMemoryError("CUDA out of memory")
    raised, is_released = run_with_error(error, failing, failing.set)
    assert raised is error
    assert is_released
    assert not abort.called.is_set()


@pytest.mark.parametrize(
    ("status", "fails"), [(0, False), (600, False), (906, False), (710, True)]
)
def test_a_gpu_that_is_busy_or_captured_has_not_failed(driver, status, fails):
    driver.status = status
    driver.failed.add(1)
    with FakeGpus(2) as gpus:
        assert [streams.has_failed(device) for device in gpus.devices] == [False, fails]
    assert not streams.has_failed(torch.device("cpu"))
