"""Nothing grows: memory, objects, threads and open files over long runs and many strategies."""

import collections
import ctypes
import gc
import os
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.leaks import Leaks
from tests.oracle import train
from tests.pairs import EXHAUSTIVE, quick_of

# A few of these come and go in the interpreter's own caches; one a step, or a strategy, would be
# many. The rest is censuses.
_TOLERATED = dict.fromkeys(
    (
        "builtins.builtin_function_or_method",
        "builtins.cell",
        "builtins.dict",
        "builtins.frame",
        "builtins.function",
        "builtins.list",
        "builtins.set",
        "builtins.tuple",
        "builtins.tuple_iterator",
        "collections.Counter",
        "collections.deque",
        "tests.soak.test_long_runs.Census",
        "weakref.ReferenceType",
    ),
    100,
)
_OURS = str(Path(mirror.__file__).parent / "*")


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``, summed over all arenas."""

    _NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _NAMES.split())


_LIBC = ctypes.CDLL(None)
_LIBC.mallinfo2.restype = _MallocInfo


def allocated_bytes():
    """Returns the bytes in use of malloc's memory.

    Resident memory moves by megabytes with what other tests of the process have freed: pieces.
    """
    info = _LIBC.mallinfo2()
    return info.uordblks + info.hblkhd


class Census:
    """Counts objects by type, threads, open files, and the bytes that mirror's lines hold."""

    def __init__(self):
        gc.unfreeze()  # what the suite has frozen is counted, too, or its copies would be new
        for _ in range(3):  # what one collection finalizes, the next one frees
            gc.collect()
        _LIBC.malloc_trim(0)  # what is only kept for later does not count
        kinds = collections.Counter(map(type, gc.get_objects()))
        self.objects = collections.Counter()
        for kind, count in kinds.items():
            name = f"{kind.__module__}.{kind.__qualname__}"
            if not name.startswith("execnet."):  # pytest-xdist's messages, which wait for a test
                self.objects[name] += count
        self.threads = sorted(thread.name for thread in threading.enumerate())
        self.num_files = len(os.listdir("/proc/self/fd"))
        self.allocated_bytes = allocated_bytes()
        self.num_mappings = len(Path("/proc/self/maps").read_bytes().splitlines())
        self.our_bytes = 0
        if tracemalloc.is_tracing():
            snapshot = tracemalloc.take_snapshot()
            ours = snapshot.filter_traces([tracemalloc.Filter(True, _OURS)])
            self.our_bytes = sum(trace.size for trace in ours.traces)

    def grown(self, before):
        """Returns by how many objects of each type there are more than before."""
        return {
            name: count - before.objects[name]
            for name, count in self.objects.items()
            if count - before.objects[name] > _TOLERATED.get(name, 0)
        }


# What stays by design is there by then: the report's history, and steps the guards count.
WARM_STEPS = 1500
# One tensor, or one small object of C++, that a step left behind would be more.
BYTES_PER_STEP = 50
BYTES_PER_STRATEGY = 1000
# What comes and goes: 55,000 bytes were seen, however many the steps.
BYTES_OF_OTHERS = 100_000

BATCH = (torch.ones(7, 3).cumsum(0), torch.arange(7) % 2)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Endless:
    """A strategy, and a program that trains in one of the three ways."""

    def __init__(self, way, schedule):
        self.way = way
        self.strategy = mirror.MirroredStrategy(["cpu"] * 2, schedule=schedule)
        with self.strategy.scope():
            self.model = nn.Linear(3, 2)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def train(self, num_steps):
        ways = {1: self._plain, 2: self._reduced, 3: self._whole}
        with self.strategy.scope():
            ways[self.way](num_steps)
        for thread in threading.enumerate():  # what has read the batches ends by itself
            if thread.name.startswith("mirror input"):
                thread.join(20)

    def _plain(self, num_steps):
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            loss_fn(self.model, BATCH).backward()
            self.optimizer.step()

    def _reduced(self, num_steps):
        for batch in self.strategy.distribute_dataset([BATCH] * num_steps):
            loss = self.strategy.reduce("mean", self.strategy.run(loss_fn, (self.model, batch)))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def _whole(self, num_steps):
        def step(batch):
            self.optimizer.zero_grad()
            loss_fn(self.model, batch).backward()
            self.optimizer.step()

        for batch in self.strategy.distribute_dataset([BATCH] * num_steps):
            self.strategy.run(step, (batch,))


def check(before, after, *, num_times, bytes_each):
    """Checks that what was done ``num_times`` in between has left nothing each time."""
    assert after.grown(before) == {}
    assert after.threads == before.threads
    assert after.num_files == before.num_files
    assert after.num_mappings - before.num_mappings < num_times
    allowed = BYTES_OF_OTHERS + num_times * bytes_each
    assert after.allocated_bytes - before.allocated_bytes < allowed


@pytest.mark.slow
def test_a_census_sees_what_grows():
    before = Census()
    kept = [torch.ones(10_000) for _ in range(1000)]
    with open(__file__):
        after = Census()
    assert after.grown(before)["torch.Tensor"] == len(kept)
    assert after.allocated_bytes - before.allocated_bytes >= 1000 * 10_000 * 4
    assert after.num_files == before.num_files + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param(1, marks=EXHAUSTIVE), 2, pytest.param(3, marks=EXHAUSTIVE)]
)
@pytest.mark.parametrize(
    ("schedule", "num_steps"),
    [
        ("lockstep", 2_000),
        ("staggered", 2_000),
        pytest.param("lockstep", 20_000, marks=EXHAUSTIVE),
    ],
)
def test_nothing_grows_over_the_steps_of_a_long_run(way, schedule, num_steps):
    program = Endless(way, schedule)
    program.train(WARM_STEPS)
    before = Census()
    program.train(num_steps)
    check(before, Census(), num_times=num_steps, bytes_each=BYTES_PER_STEP)
    program.strategy.close()


@pytest.mark.slow
def test_no_line_of_ours_holds_more_and_more():
    program = Endless(3, "lockstep")
    tracemalloc.start()
    try:
        program.train(WARM_STEPS)
        before = Census()
        program.train(500)
        assert Census().our_bytes - before.our_bytes < 20_000
    finally:
        tracemalloc.stop()
    program.strategy.close()


def use(i, *, closes):
    """Makes a strategy, trains a little in each way, and closes it or lets it go."""
    options = mirror.CommunicationOptions(timeout_seconds=(None, 60)[i % 2])
    schedule = ("lockstep", "staggered")[i // 2 % 2]
    devices = ["cpu"] * (2 + i % 2)
    strategy = mirror.MirroredStrategy(devices, schedule=schedule, communication_options=options)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for way in (1, 2, 3):
            train(way, strategy, model, optimizer, [BATCH], loss_fn)
    if closes:
        strategy.close()


def settled(leaks):
    """Returns a Census of after all strategies of a test are gone, and all of their threads."""
    gc.collect()
    use(0, closes=True)  # the next one forgets those that are gone
    deadline = time.monotonic() + 20
    while leaks.threads():
        assert time.monotonic() < deadline, leaks.threads()
        gc.collect()
        time.sleep(0.01)
    return Census()


@pytest.mark.slow
@pytest.mark.parametrize("closes", quick_of([True, False], [False]))
def test_nothing_grows_over_300_strategies(closes):
    leaks = Leaks()
    before = None
    for _ in range(4):
        for i in range(100):
            use(i, closes=closes)
        after = settled(leaks)
        if before is not None:
            check(before, after, num_times=100, bytes_each=BYTES_PER_STRATEGY)
        before = after
