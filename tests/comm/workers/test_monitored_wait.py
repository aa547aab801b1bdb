"""Nobody hangs: what became of another worker is told, in seconds, and nothing aborts."""

import re
import signal
import time
from contextlib import nullcontext

import pytest

from mirror.comm.workers.heartbeat import HeartbeatSnapshot, HeartbeatStore, summarize
from mirror.comm.workers.monitored_wait import BackgroundCall, MonitoredWait
from mirror.comm.workers.worker_status import PendingOp, WorkerStatus
from mirror.errors import WorkerLostError
from tests.comm.workers.programs import Program, run

# What a worker's wait may take until it is told, but for how long a loaded machine takes.
SOON = 30.0  # 10 where nothing else runs


def _check(ended, kind, *words, code=1):
    """Checks how a worker has ended: by an error with these words, and soon."""
    assert ended.code == code, ended
    assert ended.seconds < SOON, ended
    message = ended.err[ended.err.rindex(f"mirror.errors.{kind}: ") :]
    for word in words:
        assert re.search(word, message), message


STEPS = """
workers = made(SECONDS)
knows = False
while True:
    workers.exchange("step")  # line of the loop
    if not knows and all("train.py" in p.line for p in workers._board.look.positions):
        knows = True  # where the others were
        ready()
    time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_worker_is_named_and_where_it_was_last(lost):
    with Program(STEPS.replace("SECONDS", "60.0")) as program:
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
    with Program(STEPS.replace("SECONDS", "60.0"), size=3) as program:
        program.ready()
        program.signal(1, signal.SIGKILL)
        for ended in program.ended(0, 2):
            _check(ended, "WorkerLostError", "worker 1 of 3 is lost", "worker 1 of 3: .*train.py")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
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
    _check(ended._replace(seconds=0.0), "WorkerLostError", f"worker {lost} of 2 is lost: {why}")
    assert ended.seconds < 3.0 + 2 * SOON


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
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("does", "code", "kind", "words"),
    [
        ("raise ValueError('my own')", 1, "DivergenceError", r"ValueError: my own at .*train.py"),
        ("pass", 0, "DivergenceError", "has left its program"),
        ("sys.exit(4)", 4, "DivergenceError", "has left its program"),
        ("os._exit(3)", 3, "WorkerLostError", "worker {rank} of 2 is lost"),
    ],
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
    assert ended.seconds < SOON


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
        assert ended.seconds < SOON


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
    monkeypatch.setattr("mirror.comm.workers.heartbeat._another", lambda store: store)
    monkeypatch.setattr("mirror.comm.workers.heartbeat.PrefixStore", lambda prefix, store: store)
    board = HeartbeatStore(Gone(), 1, 2, lambda error: "")
    with pytest.raises(WorkerLostError, match=r"worker 0 of 2 is lost: .*gone: Broken pipe\n"):
        MonitoredWait(board, 30.0).wait(
            _Never(), lambda: PendingOp("1/main", 1, "a step at here.py:1")
        )
    board.deregister()


class _LateBoard:
    """A board of worker 0 of three that looks every so many seconds; worker 1 says no more."""

    rank, size, broken = 0, 3, None

    def __init__(self, every):
        self.now, self._every = 0.0, every

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def waiting(self, wait):
        return nullcontext()

    def position(self):
        return WorkerStatus()

    @property
    def look(self):
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
