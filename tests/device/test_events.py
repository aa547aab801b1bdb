"""How far a device has come, and how long it works."""

import ctypes
import threading
from contextlib import contextmanager

import pytest
import torch

from mirror.device import streams
from mirror.device.streams import Stopwatch, is_stream_idle, record_event, stream_address
from mirror.devices import synchronize

CPU = torch.device("cpu")


def test_the_cpu_has_no_stream_and_has_done_all_its_work():
    assert record_event(CPU).query()
    assert stream_address(CPU) == 0


class Driver:
    """Stands for libcuda: answers as it is told, and notes what it is asked, by which thread."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def cuEventQuery(self, event):
        self.asked.append(event.value)
        return self.answers.pop(0)

    def cuStreamQuery(self, stream):
        self.asked.append(stream.value)
        return self.answers.pop(0)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.asked.append((threading.current_thread().name, mode._obj.value))
        return 0


class TorchEvent:
    """The query holds the GIL, so no thread may call it."""

    cuda_event = 2**40 + 8

    def record(self, stream):
        self.stream = stream


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", TorchEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    return record_event(torch.device("cuda", 1))


def test_a_gpus_event_is_asked_through_the_driver(monkeypatch, recorded):
    driver = Driver(600, 600, 0)
    monkeypatch.setattr(streams, "_driver", lambda: driver)
    assert [recorded.query() for _ in range(3)] == [False, False, True]
    assert driver.asked == [TorchEvent.cuda_event] * 3


def test_what_failed_on_the_gpu_is_an_error(monkeypatch, recorded):
    monkeypatch.setattr(streams, "_driver", lambda: Driver(700))
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        recorded.query()


def test_a_stream_is_asked_on_its_device_through_the_driver(monkeypatch):
    driver, current = Driver(0, 600, 700), []

    @contextmanager
    def using(device):
        current.append(device)
        yield

    monkeypatch.setattr(streams, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", using)
    gpu = torch.device("cuda", 1)
    assert [is_stream_idle(gpu, 2**40 + i) for i in range(3)] == [True, False, False]
    assert driver.asked == [2**40, 2**40 + 1, 2**40 + 2]
    assert current == [gpu] * 3
    assert not is_stream_idle(CPU, 0)
    monkeypatch.setattr(streams, "_driver", lambda: None)
    assert not is_stream_idle(gpu, 0)


def test_a_library_of_the_driver_lets_go_of_the_gil():
    # A PyDLL would not.
    driver = streams._driver()
    assert driver is None or type(driver) is ctypes.CDLL


def test_a_thread_that_watches_spoils_no_capture(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(streams, "_driver", lambda: driver)
    streams.query_without_breaking_capture()
    assert driver.asked == [("MainThread", 2)]  # CU_STREAM_CAPTURE_MODE_RELAXED


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_event_of_a_gpu_comes_after_the_work_of_its_current_stream():
    device = torch.device("cuda", 0)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(200_000_000)
        event = record_event(device)
        assert not event.query()
        assert stream_address(device) == torch.cuda.current_stream(device).cuda_stream != 0
    synchronize(device)
    assert event.query()


def test_a_stopwatch_adds_up_what_is_between_start_and_stop(monkeypatch):
    times = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr("mirror.device.streams.perf_counter", lambda: next(times))
    watch = Stopwatch(torch.device("cpu"))
    watch.stop()  # nothing has begun
    for _ in range(2):
        watch.start()
        watch.stop()
        watch.stop()
    assert watch.seconds() == watch.seconds() == 2.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stopwatch_on_a_gpu_counts_what_the_gpu_has_done():
    device = torch.device("cuda", 0)
    watch, x = Stopwatch(device), torch.randn(4096, 4096, device=device)
    watch.start()
    for _ in range(20):
        x = torch.tanh(x @ x)
    watch.stop()
    torch.cuda.synchronize()
    assert 0 < watch.seconds() < 10
