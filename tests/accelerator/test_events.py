"""How far a device has come."""

import pytest
import torch

from mirror.accelerator.events import record_event, stream_address
from mirror.devices import synchronize

CPU = torch.device("cpu")


def test_the_cpu_has_no_stream_and_has_done_all_its_work():
    assert record_event(CPU).query()
    assert stream_address(CPU) == 0


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
