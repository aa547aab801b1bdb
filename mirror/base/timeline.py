"""Timeline: how a strategy spends its time, as sums per step and as spans of a recorded trace.

Each replica has a lane; so have the cross-replica context and the reductions that overlap a
backward pass. Spans of a lane nest. A kind counts its self time: without the spans inside. Under
``"lockstep"`` one lane moves at a time, so the self times of all lanes, without ``WAITING``, add
up to the step. If replicas run backward at once, the cross-replica lane gets a negative time: the
duration of the pass minus the sum of the replicas' times.

The begin and the end of a span are *marks*. Making one costs no call in Python; they are added up
when a step ends, and before the sums are read.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from mirror.base.mutex import Mutex
from mirror.base.safe_files import replace_atomically
from mirror.errors import StrategyError

FORWARD = "forward"  # the rest of a replica's function
BACKWARD = "backward"
OPTIMIZER = "optimizer"
INPUT = "waiting for input"
REDUCTION = "reduction"
WAITING = "waiting for other replicas"
EXPOSED = "waiting for a reduction"  # the part that the backward pass did not hide
PROGRAMS = "programs of replicas"  # this and the next three kinds belong to compiled steps
SHARED_PROGRAMS = "programs of devices"
COMPILED = "compiled step"  # the host's work around the programs
COMPILING = "tracing and compiling"
KINDS = (
    *(FORWARD, BACKWARD, OPTIMIZER, INPUT, REDUCTION, WAITING, EXPOSED),
    *(PROGRAMS, SHARED_PROGRAMS, COMPILED, COMPILING),
)

CROSS, OVERLAPPED = -2, -1  # the lanes that belong to no replica
_STEPS_KEPT = 1000
MANY_MARKS = 5000  # are added up before the step ends

# The time, the lane, the kind, and the name of a span that begins; None for one that ends.
Mark = tuple[float, int, str, "str | None"]


class _LastUsed(threading.local):
    """The timeline that the calling thread last used, as a weak reference."""

    reference: weakref.ref[Timeline] | None = None


last_used = _LastUsed()


def latest_timeline() -> Timeline | None:
    """Returns the timeline that this thread last used: that of its cross-replica context."""
    return None if last_used.reference is None else last_used.reference()


@dataclass(slots=True)
class _Span:
    kind: str
    name: str
    begin: float
    outer: _Span | None  # the open span around it
    inner_seconds: float = 0.0


@dataclass(slots=True)
class Compiled:
    """Statistics of compiled steps.

    Attributes:
        calls: the number of calls of their programs.
        traces: the number of traces.
        seconds: the time for tracing and compiling.
    """

    calls: int = 0
    traces: int = 0
    seconds: float = 0.0


class SpanTimer(Protocol):
    """Sums how long a replica's device works between ``start`` and ``stop``."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Timeline:
    """The time of one strategy.

    Attributes:
        marks: those that are not added up yet.
        mark: adds one to them, from any thread, at the time of ``clock``: ``begin`` and ``end``
            for code that cannot afford a call.
        steps: for each of the last steps, its duration and the self seconds of each kind by lane.
        compiled: statistics of compiled steps.
        sample: what ``set_sample`` has set; ``None`` between samples.
        stopwatches: one per replica during a measurement, else none.
        at_step_ends: callbacks for the end of each step.
        reference: a weak reference to this timeline, for ``last_used``.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.num_replicas = len(names)
        self.reference = weakref.ref(self)
        self.names = (*names, "cross-replica context", "reductions beside backward")
        self.steps: deque[tuple[float, list[dict[str, float]]]] = deque(maxlen=_STEPS_KEPT)
        self.compiled = Compiled()
        self.at_step_ends: list[Callable[[], None]] = []
        self.clock = perf_counter
        self.marks: list[Mark] = []
        self.mark: Callable[[Mark], object] = self.marks.append
        self.sample: Callable[[int, str | None], None] | None = None
        self.stopwatches: Sequence[SpanTimer] = ()
        self._adding = Mutex()
        self._open: list[_Span | None] = [None for _ in self.names]  # the innermost of each lane
        self._events: list[dict[str, Any]] | None = None
        self._target = Path()  # the file of the trace
        self._step_began = self.clock()
        self._zeros = dict.fromkeys(KINDS, 0.0)
        self._sums = [self._zeros.copy() for _ in self.names]

    def use(self) -> None:
        """Makes this the timeline of the calling thread's cross-replica context."""
        last_used.reference = self.reference

    def begin(self, lane: int, kind: str, name: str = "") -> None:
        """Opens a span on a lane: a replica's id, ``CROSS`` or ``OVERLAPPED``."""
        if self.marks[MANY_MARKS:]:
            self.add_up()
        self.mark((self.clock(), lane, kind, name))

    def end(self, lane: int, kind: str) -> None:
        """Closes the innermost span of this kind, and the open spans inside it."""
        self.mark((self.clock(), lane, kind, None))

    # What follows the spans as they begin and end

    def set_sample(self, sample: Callable[[int, str | None], None] | None) -> None:
        """Sets what is called at both ends of a span, with its lane, and its kind if it ends."""
        self.sample = sample
        self._choose_mark()

    def set_stopwatches(self, stopwatches: Sequence[SpanTimer]) -> None:
        """Has one per replica run while its replica is in its function, and does not wait."""
        self.stopwatches = stopwatches
        self._choose_mark()

    def _choose_mark(self) -> None:
        is_followed = self.sample is not None or self.stopwatches
        self.mark = self._mark_followed if is_followed else self.marks.append

    def _mark_followed(self, mark: Mark) -> None:
        _, lane, kind, name = mark
        if self.sample is not None:
            self.sample(lane, kind if name is None else None)
        if self.stopwatches and (kind is FORWARD or kind is WAITING):
            runs = (name is None) == (kind is WAITING)
            watch = self.stopwatches[lane]
            watch.start() if runs else watch.stop()
        self.marks.append((self.clock(), lane, kind, name))

    # Adding up

    def add_up(self) -> None:
        """Adds up the marks that were made so far."""
        marks, lock = self.marks, self._adding.lock
        try:
            lock.acquire()
            taken = marks[:]
            del marks[: len(taken)]
            for now, lane, kind, name in taken:
                span, sums = self._open[lane], self._sums[lane]
                if name is not None:
                    self._open[lane] = _Span(kind, name, now, span)
                    continue
                around = span
                while around is not None and around.kind is not kind:
                    around = around.outer
                if around is None:
                    continue  # an error has dropped it
                while span is not around.outer:
                    assert span is not None
                    seconds = now - span.begin
                    sums[span.kind] += seconds - span.inner_seconds
                    if self._events is not None:
                        self._record(lane, span, now)
                    if span.outer is not None:
                        span.outer.inner_seconds += seconds
                    span = span.outer
                self._open[lane] = span
        finally:
            try:  # noqa: SIM105
                lock.release()
            except RuntimeError:  # see Mutex
                pass

    @contextmanager
    def counting_once(self, kind: str) -> Iterator[None]:
        """Counts concurrent work of replicas inside by its duration, not once per replica."""
        before, began = self._sum_replicas(kind), self.clock()
        try:
            yield
        finally:
            counted = self._sum_replicas(kind) - before
            self._sums[CROSS][kind] += self.clock() - began - counted

    def _sum_replicas(self, kind: str) -> float:
        self.add_up()
        return sum(sums[kind] for sums in self._sums[: self.num_replicas])

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Counts the block as tracing and compiling a step."""
        began = self.clock()
        self.begin(CROSS, COMPILING)
        try:
            yield
        finally:
            self.end(CROSS, COMPILING)
            self.compiled.traces += 1
            self.compiled.seconds += self.clock() - began

    def end_step(self) -> None:
        """Ends a training step and starts the next one. See [Note: Ends of steps]."""
        now = self.clock()
        self.add_up()
        self._open[CROSS] = None
        self.steps.append((now - self._step_began, self._sums))
        self._step_began = now
        self._sums = list(map(dict, repeat(self._zeros, len(self.names))))
        for callback in self.at_step_ends:
            callback()

    def current_step(self) -> tuple[float, list[dict[str, float]]]:
        """Returns the duration and the sums of the current step."""
        self.add_up()
        return self.clock() - self._step_began, self._sums

    def drop_open(self) -> None:
        """Drops the spans that an error left open."""
        self.add_up()
        self._open = [None for _ in self.names]

    # Traces

    @contextmanager
    def recording(self, path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
        """Records the block as a trace in ``path``; yields a dict that gets the trace at the end.

        See ``start_recording``.
        """
        self.use()
        self.start_recording(path)
        content: dict[str, Any] = {}
        try:
            yield content
        finally:
            content.update(self.stop_recording())

    def start_recording(self, path: str | os.PathLike[str]) -> None:
        """Records single spans from now on.

        Raises:
            StrategyError: a recording is in progress.
            OSError: no file can be written there.
        """
        if self._events is not None:
            raise StrategyError("a trace is being taken already; end it before you begin another")
        self._target = _check_writable(path)
        self.add_up()
        self._events = []

    def stop_recording(self) -> dict[str, Any]:
        """Writes the recorded spans atomically as a Chrome trace, and returns the trace."""
        self.add_up()
        events, self._events = self._events or [], None
        hidden = self._hidden_share(events)
        threads = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": name}}
            for lane, name in enumerate(self.names)
        ]
        trace = {
            "displayTimeUnit": "ms",
            "otherData": {"hidden_share_of_communication": hidden},
            "traceEvents": threads + events,
        }
        with replace_atomically(self._target) as file:
            file.write(json.dumps(trace).encode())
        return trace

    def _record(self, lane: int, span: _Span, now: float) -> None:
        assert self._events is not None
        self._events.append(
            {
                "name": span.name or span.kind,
                "cat": span.kind,
                "ph": "X",
                "pid": 0,
                "tid": lane % len(self.names),
                "ts": span.begin * 1e6,
                "dur": (now - span.begin) * 1e6,
            }
        )

    def _hidden_share(self, events: list[dict[str, Any]]) -> float | None:
        """Returns the share of the reductions' time that no lane waited for."""
        beside_lane = OVERLAPPED % len(self.names)
        reductions = [event for event in events if event["cat"] == REDUCTION]
        beside = sum(event["dur"] for event in reductions if event["tid"] == beside_lane)
        waited = sum(event["dur"] for event in events if event["cat"] == EXPOSED)
        total = sum(event["dur"] for event in reductions)
        return max(0.0, beside - waited) / total if total else None


def _check_writable(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a file after a test that it can be written; leaves no file.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path).resolve()  # the program may change its directory before the end
    try:
        if target.exists() and not target.is_file():
            raise OSError(errno.EISDIR, "it is not a regular file")
        with suppress(_EnoughError), replace_atomically(target):
            raise _EnoughError
    except OSError as error:
        rule = "a trace needs the path of a file in a directory that exists and can be written to"
        raise OSError(error.errno, f"{error.strerror}; {rule}", str(target)) from None
    return target


class _EnoughError(Exception):
    """Ends the test of ``_check_writable``: a file could be created."""
