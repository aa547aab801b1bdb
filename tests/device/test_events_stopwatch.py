"""How long a device works."""

import pytest
import torch

from mirror.device.events import Stopwatch


def test_a_stopwatch_adds_up_what_is_between_start_and_stop(monkeypatch):
    times = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr("mirror.device.events.perf_counter", lambda: next(times))
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
