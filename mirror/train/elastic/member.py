"""Member: this process as a worker of an elastic training, as the coordinator sees it.

A coordinator elsewhere may never answer. One that was killed closes its connections, and calls of
its store raise RuntimeError. A machine that was lost, or a process that was stopped, closes
nothing: a call of a ``TCPStore`` then waits forever; the store's timeout has no effect. So
``SilenceTimer`` and ``call_or_give_up`` limit the waits for it.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from time import monotonic, sleep
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from mirror.base.process_bound import reinit_after_fork
from mirror.cluster.rendezvous import split_address
from mirror.errors import ClusterError, WorkerLostError
from mirror.train.elastic.membership import (
    ADDRESS_VARIABLE,
    NAME_VARIABLE,
    CommitId,
    MemberRecord,
    MembershipStore,
    MemberState,
    Phase,
    View,
    generation_store,
)

_log = logging.getLogger("mirror")

_BEAT_SECONDS = 0.1
_STORE_SECONDS = 60.0  # how long an operation of the store may take
_LAST_SECONDS = 2.0  # how long an end may take to be published


class Member:
    """Publishes this worker's record, and reads the coordinator's view, in a thread.

    Args:
        address: HOST:PORT of the coordinator.
        name: differs from that of every other worker.

    """

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name
        self._store = store = MembershipStore(connect_store(address), is_coordinator=False)
        self._on_over: Callable[[str], None] = lambda why: None
        self._record = MemberRecord()
        self._view = View()
        self._broken: Exception | None = None
        self._num_beats = 0  # that the coordinator has answered
        self._changed = threading.Condition()
        self._is_forked = False
        # An agent that is killed must leave no workers behind.
        self._parent = os.getppid() if os.environ.get(NAME_VARIABLE) == name else None
        store.register(name, self._record)
        self._thread = threading.Thread(target=self._run, name="mirror membership", daemon=True)
        self._thread.start()
        atexit.register(self.end, MemberState.LEFT, "its program has ended")
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Publishes nothing in a forked process, which is not a worker."""
        self._is_forked = True

    @property
    def commit(self) -> CommitId:
        """The newest commit of this worker."""
        return self._record.commit

    @commit.setter
    def commit(self, commit: CommitId) -> None:
        self._publish(commit=commit)

    @property
    def is_training(self) -> bool:
        """Whether this worker is in a generation."""
        return self._record.state is MemberState.TRAINING

    @property
    def is_broken(self) -> bool:
        """Whether the coordinator is gone."""
        return self._broken is not None

    def check_coordinator(self) -> None:
        """Raises WorkerLostError if the coordinator is gone."""
        if self._broken is not None:
            raise WorkerLostError(
                "the coordinator of the elastic training is gone, and with it the store: "
                f"{self._broken}; start the training again"
            ) from self._broken

    def store_of(self, generation: int) -> Store:
        """Returns the store for the process groups of a generation, over its own connection."""
        return generation_store(connect_store(self.address), generation)

    @property
    def is_change_due(self) -> bool:
        """Whether other workers wait to join at the next commit."""
        return self._view.phase is Phase.CHANGING

    def join(self) -> View | None:
        """Waits for the next generation with this worker; None if the training has ended.

        Raises:
            WorkerLostError: the coordinator is gone.
            ClusterError: the coordinator has ended the training with an error.
        """
        self._publish(state=MemberState.WAITING)
        view = self._wait(self._is_next)
        if view.phase is Phase.ENDED:
            if view.why:
                raise ClusterError(f"the elastic training has ended: {view.why}")
            return None
        rank = view.members.index(self.name)
        self._publish(state=MemberState.TRAINING, generation=view.generation, rank=rank)
        return view

    def finish(self) -> bool:
        """Waits until all workers have finished; False if one was lost before it had.

        Raises:
            WorkerLostError: the coordinator is gone.
        """
        self._publish(state=MemberState.FINISHED)
        view = self._wait(self._is_over)
        return view.phase is Phase.ENDED and not view.why

    def is_over_within(self, seconds: float) -> bool:
        """Waits for the end of this worker's generation; returns whether it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(self._view), seconds)
            return self._is_over(self._view) and self._view.phase is not Phase.ENDED

    def watch(self, on_over: Callable[[str], None]) -> None:
        """Calls a function with the reason once this worker's generation is over, in a thread."""
        with self._changed:
            self._on_over = on_over
            is_over, why = self._is_over(self._view), self._view.why
        if is_over:
            on_over(why)

    def leave_generation(self) -> None:
        """Publishes that this worker waits for another generation."""
        self._publish(state=MemberState.WAITING)

    def end(self, state: MemberState, why: str) -> None:
        """Publishes that this worker has left for good; idempotent."""
        if self._is_forked or self._record.state.is_end:
            return
        self._publish(state=state, why=why)
        self._thread.join(_LAST_SECONDS)

    def _is_next(self, view: View) -> bool:
        """Returns whether a view begins a generation with this worker, or ends the training."""
        is_new = view.generation > self._record.generation and self.name in view.members
        return view.phase is Phase.ENDED or (is_new and view.phase is not Phase.FORMING)

    def _is_over(self, view: View) -> bool:
        """Returns whether a view says that this worker's generation is over."""
        is_later = view.generation > self._record.generation
        return is_later or view.phase in (Phase.FORMING, Phase.ENDED)

    def _wait(self, is_due: Callable[[View], bool]) -> View:
        num_beats, timer = self._num_beats, SilenceTimer()
        with self._changed:
            while not is_due(self._view):
                self._exit_without_agent()  # the thread may wait for an answer
                if num_beats != self._num_beats:
                    num_beats = self._num_beats
                    timer.restart()
                elif timer.is_over() and self._broken is None:
                    self._broken = TimeoutError(silence_text())
                self.check_coordinator()
                self._changed.wait(_BEAT_SECONDS)  # short, so that Ctrl-C arrives
            return self._view

    def _publish(self, **changes: object) -> None:
        """Changes the record; the thread publishes it at once."""
        with self._changed:
            self._record = replace(self._record, **changes)  # type: ignore[arg-type]
            self._changed.notify_all()

    # - In the thread

    def _run(self) -> None:
        try:
            while not self._beat():
                pass
        except Exception as error:
            sleep(_BEAT_SECONDS)  # a process closes its connections before its children notice
            self._exit_without_agent()
            with self._changed:
                self._broken = error
                self._changed.notify_all()
            self._on_over(f"the coordinator is gone: {error}")

    def _exit_without_agent(self) -> None:
        if self._parent is not None and os.getppid() != self._parent:
            _log.error("the agent of this worker is gone; the process ends")
            os._exit(1)

    def _beat(self) -> bool:
        """Publishes the record and reads the view; returns whether this worker has left."""
        self._exit_without_agent()
        with self._changed:
            record = self._record = replace(self._record, beat=self._record.beat + 1)
        self._store.write_record(self.name, record)
        if record.state.is_end:
            return True
        view = self._store.read_view()
        self._num_beats += 1
        if view is not None:
            self._take(view)
        with self._changed:
            if self._record == record:
                self._changed.wait(_BEAT_SECONDS)
        return False

    def _take(self, view: View) -> None:
        with self._changed:
            if self._view.is_newer_than(view):  # another process has repeated an old one
                return
            was_over, self._view = self._is_over(self._view), view
            record = self._record
            if record.state is MemberState.WAITING and view.phase is Phase.FORMING:
                # It may have been chosen for this generation, and has missed that.
                self._record = replace(record, generation=view.generation)
            self._changed.notify_all()
            is_training = record.state is MemberState.TRAINING
        if is_training and self._is_over(view) and not was_over:
            self._on_over(view.why or "the training has ended")


def is_elastic() -> bool:
    """Returns whether an elastic training has started this process."""
    return bool(os.environ.get(ADDRESS_VARIABLE))


def connect_member() -> Member:
    """Returns this process as a member of the training that has started it.

    Raises:
        ClusterError: the address is wrong, or no coordinator answers there.
    """
    name = os.environ.get(NAME_VARIABLE) or f"{platform.node()}.{secrets.token_hex(4)}"
    return Member(os.environ[ADDRESS_VARIABLE], name)


def connect_store(address: str) -> TCPStore:
    """Returns a connection to the store of a coordinator.

    Raises:
        ClusterError: the address is wrong, or no coordinator answers there.
    """
    host, port = split_address(address)
    if port is None:
        raise ClusterError(f"{ADDRESS_VARIABLE} is HOST:PORT of the coordinator; got {address!r}")
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS))
    except RuntimeError as error:
        raise ClusterError(
            f"no coordinator of an elastic training answers at {address}: {error}"
        ) from error


T = TypeVar("T")

SILENCE_SECONDS = 60.0
"""How long a coordinator may be silent: it may be stopped, or its machine be very busy."""

_AWAKE_SECONDS = 1.0
_POLL_SECONDS = 0.05


class SilenceTimer:
    """Measures how long a coordinator has been silent while this process was awake.

    A longer time between two looks is a pause of this process, which was stopped itself.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Starts to measure: the coordinator has answered."""
        self._seconds, self._looked_at = 0.0, self._clock()

    def is_over(self) -> bool:
        """Returns whether the silence is longer than ``SILENCE_SECONDS``."""
        now = self._clock()
        self._seconds += min(now - self._looked_at, _AWAKE_SECONDS)
        self._looked_at = now
        return self._seconds > SILENCE_SECONDS


def silence_text() -> str:
    """Returns the reason for giving up."""
    return f"it has not answered for {SILENCE_SECONDS:g} s"


def call_or_give_up(call: Callable[[], T], is_interrupted: Callable[[], bool]) -> T | None:
    """Calls a coordinator's store, in a thread of its own.

    Returns:
        The result of the call; None once ``is_interrupted()`` is true.

    Raises:
        RuntimeError: the coordinator is gone.
        TimeoutError: the coordinator is silent.
    """
    outcome: list[tuple[T | None, RuntimeError | None]] = []
    is_done = threading.Event()

    def answer() -> None:
        try:
            outcome.append((call(), None))
        except RuntimeError as error:
            outcome.append((None, error))
        is_done.set()

    threading.Thread(target=answer, name="call of the coordinator", daemon=True).start()
    timer = SilenceTimer()
    while not is_done.wait(_POLL_SECONDS):
        if is_interrupted():
            return None
        if timer.is_over():
            raise TimeoutError(silence_text())
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
