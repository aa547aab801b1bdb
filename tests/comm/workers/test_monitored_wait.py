"""Waits of workers that are monitored: workers that leave, fail, or never come."""

import gc
import random
import re
import signal
import time
from contextlib import nullcontext

import pytest
import torch

from mirror.comm.workers import heartbeat, monitored_wait
from mirror.comm.workers.distributed_group import DistributedWorkerGroup
from mirror.comm.workers.heartbeat import (
    HeartbeatSnapshot,
    HeartbeatStore,
    PendingOp,
    WorkerStatus,
    summarize,
)
from mirror.comm.workers.monitored_wait import BackgroundCall, MonitoredWait
from mirror.errors import StrategyError, WorkerLostError
from tests.comm.workers.programs import LONG, Program, run
from tests.pairs import each_once, quick_of


def _check(ended, kind, *words, code=1):
    """Checks how a worker has ended: by an error with these words.

    Only a worker that was told ends: the timeout is longer than the test waits.
    """
    assert ended.code == code, ended
    message = ended.err[ended.err.rindex(f"mirror.errors.{kind}: ") :]
    for word in words:
        assert re.search(word, message), message


STEPS = """
workers = made(SECONDS)
knows = False
while True:
    workers.exchange("step")  # line of the loop
    if not knows and all("train.py" in p.line for p in workers._heartbeats.snapshot.statuses):
        knows = True  # where the others were
        ready()
    time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lost", quick_of([0, 1], [0]))
def test_a_killed_worker_is_named_and_where_it_was_last(lost):
    with Program(STEPS.replace("SECONDS", "LONG")) as program:
        program.ready()
        program.signal(lost, signal.SIGKILL)
        (ended,) = program.ended(1 - lost)
    _check(
        ended,
        "WorkerLostError",
        f"worker {lost} of 2 is lost",
        rf"worker {lost} of 2: .*train.py:\d+",
        rf"worker {1 - lost} of 2: waits in step at .*train.py:\d+ in <module>",
        "torchrun --max-restarts",
    )


@pytest.mark.slow
def test_all_others_know_which_of_three_was_killed():
    with Program(STEPS.replace("SECONDS", "LONG"), size=3) as program:
        program.ready()
        program.signal(1, signal.SIGKILL)
        for ended in program.ended(0, 2):
            _check(ended, "WorkerLostError", "worker 1 of 3 is lost", "worker 1 of 3: .*train.py")


@pytest.mark.slow
@pytest.mark.parametrize("lost", quick_of([0, 1], [1]))
def test_a_stopped_worker_is_told_after_the_timeout(lost):
    with Program(STEPS.replace("SECONDS", "3.0")) as program:
        program.ready()
        program.signal(lost, signal.SIGSTOP)
        (ended,) = program.ended(1 - lost)
    why = (
        "the store, in its process, does not answer"
        if lost == 0
        else "(nothing was heard|it has not come)"
    )
    _check(ended, "WorkerLostError", f"worker {lost} of 2 is lost: {why}")


PARTS = """
workers = made()
ready()
workers.exchange("first")
if rank == {rank}:
    {does}
else:
    workers.exchange("second")
"""


@pytest.mark.slow
@each_once(
    **{
        "does,code,kind,words": [
            (
                "raise ValueError('my own')",
                1,
                "DivergenceError",
                r"ValueError: my own at .*train.py",
            ),
            ("pass", 0, "DivergenceError", "has left its program"),
            ("sys.exit(4)", 4, "DivergenceError", "has left its program"),
            ("os._exit(3)", 3, "WorkerLostError", "worker {rank} of 2 is lost"),
        ]
    },
    rank=[0, 1],
)
def test_who_leaves_is_told_to_who_waits(rank, does, code, kind, words):
    found = run(PARTS.format(rank=rank, does=does))
    assert found[rank].code == code
    _check(found[1 - rank], kind, words.format(rank=rank), f"worker {1 - rank} of 2: waits in sec")


@pytest.mark.slow
def test_ctrl_c_ends_a_wait():
    with Program(PARTS.format(rank=0, does="time.sleep(100)")) as program:
        program.ready()
        time.sleep(1.0)
        program.signal(1, signal.SIGINT)
        (ended,) = program.ended(1)
    assert "KeyboardInterrupt" in ended.err
    assert ended.code == -signal.SIGINT


QUIET = """
workers, other = made(), made()
ready()
workers.exchange("first")
workers.all_reduce("sum", torch.ones(3))()
OWN
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    ["workers.close(); other.close()", "pass", "workers.close()", "dist.destroy_process_group()"],
)
def test_a_program_without_errors_ends_without_a_word(own):
    for ended in run(QUIET.replace("OWN", own)):
        assert (ended.code, ended.err) == (0, "")


class _Never:
    def wait(self, timeout):
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")


def test_an_error_of_the_store_is_the_loss_of_its_process(monkeypatch):
    import torch.distributed as dist

    class Gone(dist.HashStore):
        def set(self, key, value):
            raise RuntimeError("Broken pipe\nsomewhere")

    monkeypatch.setattr("mirror.comm.workers.monitored_wait._REASON_SECONDS", 0.05)
    monkeypatch.setattr("mirror.comm.workers.monitored_wait._SLICE_SECONDS", 0.01)
    monkeypatch.setattr("mirror.comm.workers.heartbeat._own_connection", lambda store: store)
    monkeypatch.setattr("mirror.comm.workers.heartbeat.PrefixStore", lambda prefix, store: store)
    board = HeartbeatStore(Gone(), 1, 2, lambda error: "")
    with pytest.raises(WorkerLostError, match=r"worker 0 of 2 is lost: .*gone: Broken pipe\n"):
        MonitoredWait(board, 30.0).wait(
            _Never(), lambda: PendingOp("1/main", 1, "a step at here.py:1")
        )
    board.deregister()


class _LateBoard:
    """A board of worker 0 of three that looks every so many seconds; worker 1 says no more."""

    rank, size, broken, lost = 0, 3, None, None

    def __init__(self, every):
        self.now, self._every = 0.0, every

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def waiting(self, wait):
        return nullcontext()

    def status(self):
        return WorkerStatus()

    @property
    def snapshot(self):
        at = self.now // self._every * self._every
        return HeartbeatSnapshot(at, [WorkerStatus()] * 3, [0.0, max(at - self._every, 0.0), 0.3])


@pytest.mark.parametrize(
    ("every", "who"),
    [
        (0.5, "worker 1 of 3"),
        (1.6, "worker 1 of 3"),  # on a busy machine
        (3.0, "worker 1 of 3"),
        (20.0, "a worker"),  # it cannot be known
    ],
)
def test_who_is_lost_is_known_however_late_looks_are(monkeypatch, every, who):
    board = _LateBoard(every)
    monkeypatch.setattr("mirror.comm.workers.monitored_wait.monotonic", board.monotonic)
    monkeypatch.setattr("mirror.comm.workers.monitored_wait.sleep", board.sleep)

    class Broken:
        def wait(self, timeout):
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(WorkerLostError, match=f"^{who} is lost: Connection reset by peer"):
        MonitoredWait(board, 60.0).wait(
            Broken(), lambda: PendingOp("1/main", 1, "a step at here.py:1")
        )
    assert board.now < 8


@pytest.mark.parametrize(
    ("every", "lost"),
    [(0.01, "worker 1 of 3"), (0.9, "worker 1 of 3"), (20.0, "worker 0 of 3")],
)
def test_a_late_read_is_no_loss_of_the_store(monkeypatch, every, lost):
    board = _LateBoard(every)
    monkeypatch.setattr("mirror.comm.workers.monitored_wait.monotonic", board.monotonic)

    class Pending:
        def wait(self, timeout):
            board.sleep(timeout.total_seconds())
            raise RuntimeError("Operation timed out!")

    board.sleep(30.7)  # in the middle between two reads
    with pytest.raises(WorkerLostError, match=f"^{lost} is lost") as caught:
        MonitoredWait(board, 1.0).wait(Pending(), lambda: PendingOp("1/main", 1, "a step"))
    assert ("does not answer" in str(caught.value)) == (every > 2.5)


def test_an_errand_returns_or_raises_what_its_call_does():
    from datetime import timedelta

    assert BackgroundCall(lambda: 3).wait(timedelta(seconds=5)) == 3
    with pytest.raises(ZeroDivisionError):
        BackgroundCall(lambda: 1 / 0).wait(timedelta(seconds=5))
    with pytest.raises(RuntimeError, match="timed out"):
        BackgroundCall(lambda: time.sleep(0.2)).wait(timedelta(seconds=0.01))


def test_an_error_is_told_in_short():
    assert summarize(ValueError("one:\ntwo")) == "ValueError: one"
    assert summarize(KeyError()) == "KeyError: "


OPERATIONS = ("exchange", "long", "tensors", "broadcast", "sum", "total")
ENDS = ("raise", "close", "let go")


def quick():
    """Has workers look at each other more often than they need to."""
    monitored_wait._SLICE_SECONDS = heartbeat._LOOK_SECONDS = heartbeat._BEAT_SECONDS = 0.02


def _two_programs(seed):
    """Two lists of operations, which are equal up to where one worker goes its own way."""
    draw = random.Random(seed)
    one = [(draw.choice(OPERATIONS), draw.randint(1, 4)) for _ in range(draw.randint(1, 6))]
    other, at = list(one), draw.randrange(len(one))
    manner = draw.choice(("another", "size", "skip", "once more", "order", *ENDS))
    if manner == "another":
        other[at] = (draw.choice([o for o in OPERATIONS if o != one[at][0]]), one[at][1])
    elif manner == "size":
        other[at] = (one[at][0], one[at][1] + 1)
    elif manner == "skip":
        del other[at]
    elif manner == "once more":
        other.insert(at, (draw.choice(OPERATIONS), draw.randint(1, 4)))
    elif manner == "order":
        other.insert(draw.randrange(len(one)), other.pop(at))
    else:
        other[at:] = [(manner, 0)]
    both = [one, other]
    draw.shuffle(both)
    return both


def _do(workers, operation, size):
    if operation == "exchange":
        workers.exchange("exchange", size)
    elif operation == "long":
        workers.exchange("long", size, lambda: b"x" * 3000 * size * (workers.rank + 1))
    elif operation == "tensors":
        workers.exchange_tensors("tensors", [size], [torch.ones(size)])
    elif operation == "broadcast":
        workers.broadcast("broadcast", [torch.ones(size)])
    elif operation == "sum":
        workers.all_reduce("sum", torch.ones(size))()
    elif operation == "total":
        workers.exchange("total", size)
        workers.all_reduce_sum_("total", torch.ones(size))
    else:
        raise ValueError("my own")


def part(seeds):
    quick()
    gc.freeze()  # what there is already: or every collection takes long
    told = []
    for seed in seeds:
        workers = DistributedWorkerGroup(1, lambda: "train.py:1", LONG, lambda error: "train.py:1")
        program = _two_programs(seed)[workers.rank]
        try:
            for operation, size in program:
                if operation in ("close", "let go"):
                    break
                _do(workers, operation, size)
            if ("let go", 0) not in program:
                workers.close()
            told.append(("ended", ""))
        except (ValueError, RuntimeError) as error:
            told.append((type(error).__name__, str(error)))
            if not isinstance(error, ValueError):
                with pytest.raises(StrategyError, match="came to its end with"):
                    workers.exchange("once more")
            workers.close()
        del workers
        gc.collect()
    gc.unfreeze()
    return told


def _check_parting(seeds, told_by_both):
    for seed, *told in zip(seeds, *told_by_both, strict=True):
        one, other = _two_programs(seed)
        errors = [kind for kind, _ in told if kind in ("DivergenceError", "WorkerLostError")]
        assert bool(errors) == (one != other), (seed, told)
        for kind, message in told:
            assert kind in ("DivergenceError", "WorkerLostError", "ValueError", "ended")
            if kind in ("DivergenceError", "WorkerLostError"):
                assert "worker 0 of 2: " in message, (seed, message)
                assert "worker 1 of 2: " in message, (seed, message)
                assert "train.py:1" in message, (seed, message)


def test_who_parts_ways_is_named_on_all(worker_pool):
    seeds = list(range(50))
    _check_parting(seeds, worker_pool(2).run(part, seeds))


@pytest.mark.slow
@pytest.mark.parametrize("first", quick_of([1000, 1100], [1000]))
def test_who_parts_ways_is_named_on_all_in_many_programs(worker_pool, first):
    seeds = list(range(first, first + 100))
    _check_parting(seeds, worker_pool(2).run(part, seeds))


def test_the_programs_part_in_every_manner():
    pairs = [_two_programs(seed) for seed in range(50)]
    seen = {operation for pair in pairs for program in pair for operation, _ in program}
    assert seen == {*OPERATIONS, *ENDS}


def close_twice():
    quick()
    first, second = (
        DistributedWorkerGroup(1, lambda: "here", 30.0),
        DistributedWorkerGroup(2, lambda: "here", 30.0),
    )
    said = [first.exchange("one", None, lambda: b"1"), second.exchange("two")]
    first.close()
    first.close()
    second.all_reduce("sum", summed := torch.ones(3))()
    with pytest.raises(StrategyError, match="this strategy is closed"):
        first.exchange("one")
    # All sizes that have no process group of their own are announced.
    second._sums = dict.fromkeys(range(10**4))
    second.all_reduce("sum", other := torch.ones(5))()
    second.close()
    third = DistributedWorkerGroup(1, lambda: "here", 30.0)
    said.append(third.exchange("three"))
    third.close()
    return said, summed.tolist(), other.tolist(), second.counts


def test_strategies_live_one_after_the_other_and_at_once(worker_pool):
    expected = [[b"1", b"1"], [b"", b""], [b"", b""]], [2.0] * 3, [2.0] * 5, (2, 2)
    assert worker_pool(2).run(close_twice) == [expected] * 2


def late():
    quick()
    workers = DistributedWorkerGroup(1, lambda: "train.py:7", 1.0)
    if workers.rank == 0:
        with pytest.raises(
            WorkerLostError, match=r"worker 1 of 2 is lost(.|\n)*goes on"
        ) as caught:
            workers.exchange("step", [3])
        assert "waits in step of [3] at train.py:7" in str(caught.value)
        return "done"
    time.sleep(2.5)
    workers.exchange("step", [3])  # what worker 0 had to say there, it has said
    with pytest.raises(WorkerLostError, match="worker 0 of 2: has given up"):
        workers.exchange("step", [3])
    return "done"


def test_who_does_not_come_within_the_timeout_is_lost(worker_pool):
    assert worker_pool(2).run(late) == ["done", "done"]
