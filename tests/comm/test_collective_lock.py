"""Collectives of one communicator take turns: on threads, on streams, in forks."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
import torch

from mirror import comm
from mirror.comm.collective_lock import CollectiveLock, hold_lock
from mirror.comm.host_backends import HostCommunicator
from mirror.errors import BackendError, CollectiveTimeoutError
from tests.comm.nccl.fake_nccl import MISSING, FakeNccl
from tests.interrupts.test_exits import in_child
from tests.pairs import EXHAUSTIVE, every

N = 3


class SharedScratch:
    """Collectives in memory that all share, with the time for others to come; no communicator."""

    def __init__(self, devices):
        super().__init__(devices)
        self.scratch = {}

    def _through_scratch(self, tensors, value):
        self.scratch["now"] = value
        sleep(1e-4)
        for tensor in tensors:
            tensor.copy_(self.scratch["now"][: len(tensor)])

    def all_reduce(self, tensors, op="sum", scale=1.0):
        """Adds them up."""
        self._through_scratch(tensors, scale * torch.stack(list(tensors)).sum(0))

    def broadcast(self, tensors, root=0):
        self._through_scratch(tensors, tensors[root].clone())

    def reduce_scatter(self, tensors, op="sum"):
        self.all_reduce(tensors, op)

    def all_gather(self, tensors):
        chunks = [t.tensor_split(len(tensors))[i] for i, t in enumerate(tensors)]
        self._through_scratch(tensors, torch.cat(chunks))


class Scratch(SharedScratch, comm.Communicator):
    pass


class Written(comm.Communicator):
    """Has them in its own body, and calls no constructor of ours."""

    def __init__(self, devices):
        self.devices = tuple(torch.device(device) for device in devices)
        self.scratch = {}

    _through_scratch = SharedScratch._through_scratch
    all_reduce = SharedScratch.all_reduce
    broadcast = SharedScratch.broadcast
    reduce_scatter = SharedScratch.reduce_scatter
    all_gather = SharedScratch.all_gather


class Derived(SharedScratch, HostCommunicator):
    """Adds shared memory to a class that is concurrent."""

    all_reduce_checked = comm.Communicator.all_reduce_checked


OWN = {kind.__name__: kind for kind in (Scratch, Written, Derived)}
KERNELS = ("direct", "hierarchical", "ring")
NAMES = [*comm.available(["cpu"] * N), *OWN, *([] if MISSING else ["nccl"])]
UNSAFE_ALONE = [*(name for name in KERNELS if name in NAMES), *OWN]


def create(name, **options):
    if name in OWN:
        return OWN[name](["cpu"] * N)
    if name == "nccl":
        return FakeNccl().communicator(N)
    return comm.create(name, ["cpu"] * N, **(options if name in KERNELS else {}))


def do_all_collectives(communicator, worker, num_rounds, start):
    """Returns what came out wrong; all values are small integers, so sums are exact."""
    start.wait()
    chunks = torch.arange(60 + 3 * worker).tensor_split(N)
    wrong = []
    for number in range(num_rounds):
        value, size = 10 * worker + number % 7, 60 + 3 * worker
        dtype = torch.float32 if number % 2 else torch.int64

        def tensors(value=value, size=size, dtype=dtype):
            return [torch.full((size,), value + i, dtype=dtype) for i in range(N)]

        total = N * value + N * (N - 1) // 2
        one, two = tensors(), [[t, t.clone()] for t in tensors()]
        communicator.all_reduce(one)
        wrong += ["all_reduce" for t in one if not bool((t == total).all())]
        communicator.all_reduce_lists(two)
        wrong += ["lists" for ts in two for t in ts if not bool((t == total).all())]
        one = tensors()
        communicator.broadcast(one, root=1)
        wrong += ["broadcast" for t in one if not bool((t == value + 1).all())]
        one = tensors()
        communicator.all_gather(one)
        gathered = torch.cat([torch.full((len(c),), value + i) for i, c in enumerate(chunks)])
        wrong += ["all_gather" for t in one if not torch.equal(t.long(), gathered)]
        one = tensors()
        communicator.reduce_scatter(one)
        own = [t.tensor_split(N)[i] for i, t in enumerate(one)]
        wrong += ["reduce_scatter" for t in own if not bool((t == total).all())]
    return wrong


def stress(communicator, num_threads=4, num_rounds=10):
    """Returns what came out wrong in any of the threads that use one communicator at once."""
    start = threading.Barrier(num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        done = [
            pool.submit(do_all_collectives, communicator, worker, num_rounds, start)
            for worker in range(num_threads)
        ]
        return [what for future in done for what in future.result()]


@pytest.mark.parametrize("name", NAMES)
def test_threads_that_share_a_communicator_get_exact_sums(name):
    communicator = create(name)
    assert stress(communicator) == []
    communicator.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_threads", "num_rounds"),
    [(16, 8), *(pytest.param(n, 100, marks=EXHAUSTIVE) for n in (2, 8, 16))],
)
@pytest.mark.parametrize("name", every(2, NAMES))
def test_many_threads_that_share_a_communicator_get_exact_sums(name, num_threads, num_rounds):
    communicator = create(name)
    assert stress(communicator, num_threads, num_rounds) == []
    communicator.close()


@pytest.mark.parametrize("name", UNSAFE_ALONE)
def test_without_turns_the_stress_finds_errors(name, monkeypatch):
    monkeypatch.setattr(CollectiveLock, "call", lambda self, collective, devices: collective())
    communicator = create(name, timeout_seconds=0.05)
    for _ in range(20):
        try:
            if stress(communicator):
                return
        except (CollectiveTimeoutError, RuntimeError):  # the latter of sizes that do not fit
            return
    pytest.fail("no check found that the lock is gone")


def test_every_backend_says_whether_it_is_concurrent():
    concurrent = {
        name for name in comm.registry.names() if comm.registry.check_name(name).concurrent
    }
    assert concurrent == {"host", "naive", "nccl"}
    assert not any(kind.concurrent for kind in OWN.values())


class Meeting(comm.Communicator):
    """Says that it is concurrent; two collectives meet inside."""

    concurrent = True

    def __init__(self, devices):
        super().__init__(devices)
        self.both = threading.Barrier(2)

    def all_reduce(self, tensors, op="sum", scale=1.0):
        self.both.wait(timeout=20)

    broadcast = reduce_scatter = all_gather = all_reduce


def test_collectives_of_a_concurrent_class_go_on_at_once():
    meeting = Meeting(["cpu"])
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(meeting.all_reduce, [torch.ones(1)]) for _ in range(2)]
        assert [future.result() for future in done] == [None, None]


class MadeOfOthers(Scratch):
    def all_reduce(self, tensors, op="sum", scale=1.0):
        self.reduce_scatter(tensors, op)
        self.all_gather(tensors)

    def reduce_scatter(self, tensors, op="sum"):
        super().all_reduce(tensors, op)


def test_a_collective_may_be_made_of_others():
    assert stress(MadeOfOthers(["cpu"] * N), num_rounds=3) == []


class Failing(Scratch):
    def broadcast(self, tensors, root=0):
        raise RuntimeError("no")


def test_a_collective_that_raises_gives_its_turn_back():
    communicator = Failing(["cpu"] * N)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            communicator.broadcast([torch.ones(1)] * N)
    with ThreadPoolExecutor(1) as pool:
        tensors = [torch.ones(1) for _ in range(N)]
        pool.submit(communicator.all_reduce, tensors).result(timeout=20)
    assert [tensor.item() for tensor in tensors] == [N] * N


class Slow(Scratch):
    def __init__(self, devices):
        super().__init__(devices)
        self.began, self.go_on = threading.Event(), threading.Event()
        self.log = []

    def all_reduce(self, tensors, op="sum", scale=1.0):
        self.began.set()
        assert self.go_on.wait(timeout=20)
        self.log.append("reduced")

    def close(self):
        self.log.append("closed")
        super().close()


def test_close_waits_for_the_collective_of_another_thread():
    slow = Slow(["cpu"])
    with ThreadPoolExecutor(2) as pool:
        reduced = pool.submit(slow.all_reduce, [torch.ones(1)])
        assert slow.began.wait(timeout=20)
        closed = pool.submit(slow.close)
        slow.go_on.set()
        reduced.result(timeout=20)
        closed.result(timeout=20)
    assert slow.log == ["reduced", "closed"]


@pytest.mark.parametrize("name", [name for name in KERNELS if name in NAMES])
def test_a_communicator_closed_by_another_thread_is_no_crash(name):
    communicator = create(name)

    def reduce_until_closed():
        while True:
            communicator.all_reduce([torch.ones(5000) for _ in range(N)])

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(reduce_until_closed) for _ in range(2)]
        sleep(0.05)
        communicator.close()
        for future in done:
            with pytest.raises(BackendError, match="closed"):
                future.result(timeout=20)


def test_a_method_takes_one_turn():
    assert hold_lock(Scratch.all_reduce) is Scratch.all_reduce
    assert Scratch.all_reduce.__doc__ == "Adds them up."
    assert Scratch.all_reduce.__name__ == "all_reduce"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_the_other():
    turn, taken, done = CollectiveLock(), threading.Event(), threading.Event()

    def collective():
        taken.set()
        assert done.wait(60)

    thread = threading.Thread(target=turn.call, args=(collective, []))
    thread.start()
    try:
        assert taken.wait(60)
        assert in_child(lambda: turn.call(lambda: None, [])) == 0
    finally:
        done.set()
        thread.join(60)


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
    monkeypatch.setattr(CollectiveLock, "_wait_for_previous", lambda self, gpu: None)
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
