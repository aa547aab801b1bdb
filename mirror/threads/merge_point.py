"""Merge points, where the replicas of a run meet; the turns of a run, and its first failure.

Errors for replicas that diverge or stall have one line on the position of each replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from mirror.errors import CollectiveTimeoutError, DivergenceError, StrategyError
from mirror.threads.schedule import TurnTimer
from mirror.threads.user_frames import annotate_error, stacks, user_line


class Failure:
    """The first error of a run. Errors that follow while replicas unwind are ignored.

    Attributes:
        error: the error of a task, or of the wait for one; ``None`` if there is none.
        replica_id: the replica of that task; ``None`` if the error belongs to no replica.
    """

    # Class attributes and no __init__: every run makes one, and this is faster.
    error: BaseException | None = None
    replica_id: int | None = None

    def record(self, error: BaseException, replica_id: int | None) -> None:
        """Stores the error of a replica's task, or of the wait for it, if it is the first."""
        if self.error is None:
            self.error, self.replica_id = error, replica_id

    def blame(self, cause: BaseException | None, replica_id: int) -> None:
        """Replaces a divergence by the exception that the replica was handling: that caused it."""
        is_unblamed = isinstance(self.error, DivergenceError) and self.replica_id is None
        if is_unblamed and cause is not None and not isinstance(cause, RunCancelled):
            self.error, self.replica_id = cause, replica_id

    def throw(self, names: Sequence[str]) -> NoReturn:
        """Raises the error, with a note that names the replica, and drops the reference to it."""
        error, self.error = self.error, None
        assert error is not None
        if self.replica_id is not None:
            annotate_error(error, names[self.replica_id])
        try:
            raise error
        finally:
            del error


Tasks = dict[int, Callable[[], Any]]  # by replica id
Payloads = dict[int, Any]  # by replica id
Action = Callable[[Payloads], Payloads]
Act = Callable[[Action, Payloads], Payloads]


@dataclass(slots=True)
class MergePoint:
    """One replica's arrival at a point where replicas must meet.

    Attributes:
        operation: its name in messages, ``"all_reduce(sum)"``.
        signature: must be equal on all replicas.
        payload: this replica's contribution.
        action: called once with all payloads by replica id; returns each replica's result.
        detail: further text for messages, such as shapes.
        is_partial: whether only some of the replicas need to come: [Note: Partial merge points].
    """

    operation: str
    signature: Hashable
    payload: Any
    action: Action
    detail: str = ""
    is_partial: bool = False

    def __str__(self) -> str:
        return f"{self.operation} of {self.detail}" if self.detail else self.operation


@dataclass(slots=True)
class MergeError:
    """The result of a merge if its action raised."""

    error: BaseException


class RunCancelled(BaseException):
    """Unwinds a replica after another replica of its run has failed; never reaches the user."""


def act_directly(action: Action, payloads: Payloads) -> Payloads:
    """Runs the action of a merge point directly."""
    return action(payloads)


def describe_position(point: MergePoint | None, frame: FrameType | None, is_next: bool) -> str:
    """Returns the position of a replica in words.

    Args:
        point: the merge point at which it waits, if any.
        frame: its current frame, if it has started and not ended.
        is_next: whether it waits for its turn, to start or to continue.
    """
    if point is not None:
        return f"waits in {point} at {user_line(frame)}"
    if frame is not None:
        return f"still runs at {user_line(frame)}"
    return "waits for its turn" if is_next else "has returned"


def describe_all(
    names: Mapping[int, str],
    waiting: Mapping[int, MergePoint],
    frames: Mapping[int, FrameType | None],
    runnable: Container[int],
) -> str:
    """Returns one line per replica with its position.

    Args:
        names: the names of the active replicas, by replica id.
        waiting: the merge points of the waiting replicas.
        frames: the current frames of the replicas that have started and not ended.
        runnable: the replicas that wait for their turn.
    """
    return "\n".join(
        f"  {name}: {describe_position(waiting.get(r), frames.get(r), r in runnable)}"
        for r, name in sorted(names.items())
    )


def mismatch(points: Iterable[MergePoint]) -> bool:
    """Whether these merge points differ in operation or signature."""
    first, *others = points
    for point in others:
        if point.operation != first.operation or point.signature != first.signature:
            return True
    return False


def divergence(where: str) -> DivergenceError:
    """Returns the error for replicas that have stopped at different merge points.

    Args:
        where: one line per replica with its position.
    """
    return DivergenceError(
        "all replicas must reach the same collectives in the same order, with the same shapes "
        f"and dtypes; they did not:\n{where}\n"
        "make the control flow around the collective the same on every replica"
    )


def timeout(timeout_seconds: float, where: str) -> CollectiveTimeoutError:
    """Returns the error for a run in which no replica has moved for ``timeout_seconds``."""
    return CollectiveTimeoutError(
        f"no replica moved for timeout_seconds={timeout_seconds}:\n{where}\n"
        "raise the timeout in CommunicationOptions, or find what keeps the replica. Where the "
        f"threads stand:\n{stacks()}"
    )


class RunQueue:
    """The turns of one run of replicas. See [Note: Turns] in ``lockstep.py``.

    A replica is in exactly one of ``runnable``, ``running``, ``waiting``, or has ended.

    Args:
        replica_ids: the replicas of the run, in the order of their first turns.

    Attributes:
        runnable: the replicas that wait for their turn, the next one first.
        running: the replicas that have their turn.
        waiting: by replica id, the merge point where a replica waits.
        frames: by replica id, the frame of a waiting replica.
        unstarted: the replicas that have had no turn yet.
        order: the replicas in the order of their turns since the last merge.
        num_turns: the number of turns given so far.
        away: the replicas in a long call without Python, such as a backward pass, also while they
            wait at a merge point inside it. Empty unless the schedule is ``"staggered"``.
        returning: the replicas in ``runnable`` that have ended such a call.
        stalled: running replicas in whose place others have started.
    """

    __slots__ = (
        *("runnable", "running", "waiting", "frames", "unstarted", "order", "num_turns"),
        *("away", "returning", "stalled"),
    )

    def __init__(self, replica_ids: Iterable[int] = ()) -> None:
        self.runnable = deque(replica_ids)
        self.running: set[int] = set()
        self.waiting: dict[int, MergePoint] = {}
        self.frames: dict[int, FrameType] = {}
        self.unstarted, self.order = set(self.runnable), list(self.runnable)
        self.num_turns = 0
        self.away: list[int] = []
        self.returning: list[int] = []
        self.stalled: list[int] = []

    def next(self) -> int:
        """Gives the next replica its turn and returns it."""
        successor = self.runnable.popleft()
        self.running.add(successor)
        self.unstarted.discard(successor)
        if successor in self.returning:
            self.returning.remove(successor)
        self.num_turns += 1
        return successor

    def in_python(self) -> list[int]:
        """Returns the running replicas that are neither away nor stalled."""
        return [r for r in tuple(self.running) if r not in self.away and r not in self.stalled]

    def move_up(self, devices: Sequence[object]) -> bool:
        """Moves the first runnable replica on a free device to the front.

        A device is free if none of its replicas runs, or is to go on after a long call.

        Args:
            devices: of each replica.

        Returns:
            Whether there is one.
        """
        for replica_id in self.runnable:
            device, others = devices[replica_id], {*self.running, *self.returning} - {replica_id}
            if all(devices[r] != device for r in others):
                self.runnable.remove(replica_id)
                self.runnable.appendleft(replica_id)
                return True
        return False

    @property
    def is_over(self) -> bool:
        """Whether all replicas have ended."""
        return not (self.running or self.runnable or self.waiting)

    def drop_unstarted(self) -> None:
        """Removes the replicas that have not started, because the run has failed."""
        self.runnable = deque(r for r in self.runnable if r not in self.unstarted)

    def find_meeting(self) -> tuple[int, ...]:
        """Returns the replicas that meet at one merge point, if no replica runs any more.

        See [Note: Partial merge points]. If all replicas must meet and do not, returns none.
        """
        waiting, partial = self.waiting, list[int]()
        for r in sorted(waiting):
            if waiting[r].is_partial:
                partial.append(r)
        if partial:
            first = waiting[partial[0]]
            return tuple(r for r in partial if not mismatch((first, waiting[r])))
        if len(waiting) < len(self.order) or mismatch(waiting.values()):
            return ()
        return tuple(sorted(waiting))

    def release(self, last: int, meeting: Sequence[int]) -> None:
        """Makes the replicas that met runnable: the one that stopped last continues first."""
        before, self.order = self.order, [last]
        for r in reversed(before):
            if r != last:
                self.order.append(r)
        for r in self.order:
            if r in meeting:
                self.runnable.append(r)
                del self.waiting[r], self.frames[r]


class NullLockstep:
    """The lockstep of one replica's forward, recomputed by a backward pass outside ``run``."""

    takes_turns, is_eager, pace = True, False, TurnTimer()

    def let_next_begin(self, replica_id: int) -> bool:
        """Does nothing: there is no next replica."""
        return False

    def wait_for_turn(self, replica_id: int) -> None:
        """Does nothing: there is no other replica."""

    def take_turns(self, replica_id: int) -> bool:
        """Does nothing: there is no other replica."""
        return True

    def check_going_on(self) -> None:
        """Does nothing: there is no other replica that could fail."""

    def merge(self, replica_id: int, point: MergePoint) -> object:
        """Raises StrategyError: one thread cannot wait for itself."""
        raise StrategyError(
            f"{point} cannot wait for the other replicas in a backward pass outside "
            "strategy.run, where one thread goes through all of them; call backward inside run, "
            "or keep it out of what activation checkpointing recomputes, and out of the backward "
            "of a custom function"
        )
