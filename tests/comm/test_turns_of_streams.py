"""Collectives on several streams go one after the other: streams that do what events allow."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from mirror import comm
from mirror.comm.collective_lock import CollectiveLock


class FakeStream:
    def __init__(self, device):
        self.device, self.work = device, []

    def wait_event(self, event):
        self.work.append(("wait", event.at))


class FakeEvent:
    at = None

    def record(self, stream):
        self.at = (stream, len(stream.work))
        stream.work.append(("record", self.at))


class FakeGpus:
    """Two GPUs of three streams each; one of them is current in each thread."""

    def __init__(self, monkeypatch):
        self.devices = (torch.device("cuda", 0), torch.device("cuda", 1))
        self.streams = {d: [FakeStream(d) for _ in range(3)] for d in self.devices}
        self.mine = threading.local()
        monkeypatch.setattr(torch.cuda, "current_stream", self.current)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)

    def current(self, device):
        return self.streams[device][getattr(self.mine, "number", 0)]

    def run(self, choice):
        """Does all work; returns per device the begins and ends of collectives, in order."""
        todo = [(stream, iter(stream.work)) for d in self.devices for stream in self.streams[d]]
        heads = [[stream, work, next(work, None)] for stream, work in todo]
        happened, log = set(), {device: [] for device in self.devices}
        while any(head[2] is not None for head in heads):
            ready = [h for h in heads if h[2] is not None and self.may_go(h[2], happened)]
            assert ready, "the streams wait for each other"
            head = choice(ready)
            kind, what = head[2]
            if kind == "record":
                happened.add(what)
            elif kind != "wait":
                log[head[0].device].append((kind, what))
            head[2] = next(head[1], None)
        return log

    @staticmethod
    def may_go(item, happened):
        return item[0] != "wait" or item[1] in happened


class Kernels(comm.Communicator):
    """Enqueues work that begins and ends, on the GPUs' current streams."""

    def __init__(self, gpus):
        self.gpus, self.devices, self.num_calls = gpus, gpus.devices, 0

    def all_reduce(self, tensors, op="sum", scale=1.0):
        self.num_calls += 1
        for device in self.devices:
            for kind in ("begin", "end"):
                self.gpus.current(device).work.append((kind, self.num_calls))

    broadcast = reduce_scatter = all_gather = all_reduce


def enqueue(gpus, num_calls, rng):
    communicator = Kernels(gpus)
    for _ in range(num_calls):
        gpus.mine.number = rng.randrange(3)
        communicator.all_reduce([])


def faults(logs):
    """Returns the logs in which collectives overlap, or GPUs have them in different orders."""
    return [
        log
        for log in logs
        if len({tuple(events) for events in log.values()}) > 1
        or any(
            begin != ("begin", end[1]) or end[0] != "end"
            for events in log.values()
            for begin, end in zip(events[::2], events[1::2], strict=True)
        )
    ]


def test_collectives_on_several_streams_go_one_after_the_other(monkeypatch):
    rng = random.Random(0)
    for _ in range(20):
        gpus = FakeGpus(monkeypatch)
        enqueue(gpus, 12, rng)
        logs = [gpus.run(rng.choice) for _ in range(20)]
        assert faults(logs) == []
        assert all(len(events) == 24 for events in logs[0].values())


def test_without_events_collectives_on_several_streams_overlap(monkeypatch):
    monkeypatch.setattr(CollectiveLock, "_follow", lambda self, gpu: None)
    rng, gpus = random.Random(0), FakeGpus(monkeypatch)
    enqueue(gpus, 12, rng)
    assert faults([gpus.run(rng.choice) for _ in range(20)])


def test_collectives_on_one_stream_wait_for_nothing(monkeypatch):
    gpus = FakeGpus(monkeypatch)
    communicator = Kernels(gpus)
    for _ in range(5):
        communicator.all_reduce([])
    kinds = [kind for kind, _ in gpus.current(gpus.devices[0]).work]
    assert kinds == ["begin", "end", "record"] * 5


def test_threads_with_streams_of_their_own_go_one_after_the_other(monkeypatch):
    rng, gpus = random.Random(0), FakeGpus(monkeypatch)
    communicator = Kernels(gpus)

    def reduce_on(number):
        gpus.mine.number = number
        for _ in range(10):
            communicator.all_reduce([])

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(reduce_on, number) for number in range(3)]:
            future.result(timeout=20)
    assert faults([gpus.run(rng.choice) for _ in range(20)]) == []
