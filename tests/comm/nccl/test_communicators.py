"""operations.py: when an operation is done, and who is not."""

from types import SimpleNamespace

import pytest
import torch

from mirror.comm.nccl import communicators
from mirror.comm.nccl.communicators import Work

GPUS = [torch.device("cuda", i) for i in range(3)]


def event(is_done):
    return SimpleNamespace(query=lambda: is_done)


def operation(*events):
    return Work("a sum", 1.0, 0.0, streams=(10, 11, 12), events=list(map(event, events)))


def test_it_is_done_when_all_of_its_events_have_happened():
    assert operation().is_done()  # nothing was enqueued
    assert operation(True).is_done()
    assert operation(True, True, True).is_done()
    assert not operation(False).is_done()
    assert not operation(True, True, False).is_done()


@pytest.mark.parametrize(
    ("events", "idle", "late"),
    [
        ((False,), (), (0, 1, 2)),
        ((False,), (11,), (0, 2)),
        ((False,), (10, 11), (2,)),
        ((True, False, True), (), (1,)),
        ((False, False, True), (10, 11, 12), (0, 1)),
    ],
)
def test_the_late_are_those_whose_events_or_streams_say_so(monkeypatch, events, idle, late):
    asked = []

    def has_nothing_left(device, stream):
        asked.append((device.index, stream))
        return stream in idle

    monkeypatch.setattr(communicators, "is_stream_idle", has_nothing_left)
    expected = ", ".join(f"replica {i} (cuda:{i})" for i in late)
    assert operation(*events).timeout_message(GPUS) == expected
    assert asked == ([(0, 10), (1, 11)] if len(events) == 1 else [])
