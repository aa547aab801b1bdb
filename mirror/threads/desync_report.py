"""Errors for replicas that diverge or stall, with one line on the position of each replica."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from types import FrameType

from mirror.errors import CollectiveTimeoutError, DivergenceError
from mirror.threads.merge_point import MergePoint
from mirror.threads.user_frames import stacks, user_line


def describe(point: MergePoint | None, frame: FrameType | None, is_next: bool) -> str:
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
        f"  {name}: {describe(waiting.get(r), frames.get(r), r in runnable)}"
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
