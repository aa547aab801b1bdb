"""The errors of replicas that do not go on together."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from types import FrameType

from mirror.errors import CollectiveTimeoutError, DivergenceError
from mirror.threads.merge_point import MergePoint
from mirror.threads.user_frames import stacks, user_line


def describe(point: MergePoint | None, frame: FrameType | None, is_next: bool) -> str:
    """Returns where a replica stands, in words.

    Args:
        point: where it waits for others.
        frame: what it executes, of one that has begun and not ended.
        is_next: whether it has not, but will begin, or go on.
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
    """Returns a line for each replica, on where it stands.

    Args:
        names: of those that take part.
        waiting: where those stand that wait for others.
        frames: what those execute that have begun and not ended.
        runnable: those that will begin, or go on.
    """
    return "\n".join(
        f"  {name}: {describe(waiting.get(r), frames.get(r), r in runnable)}"
        for r, name in sorted(names.items())
    )


def mismatch(points: Iterable[MergePoint]) -> bool:
    """Whether replicas that stand at these points do not stand at one."""
    first, *others = points
    for point in others:
        if point.operation != first.operation or point.signature != first.signature:
            return True
    return False


def divergence(where: str) -> DivergenceError:
    """Returns the error for replicas that do not stand at one merge point.

    Args:
        where: a line for each replica, on where it stands.
    """
    return DivergenceError(
        "all replicas must reach the same collectives in the same order, with the same shapes "
        f"and dtypes; they did not:\n{where}\n"
        "make the control flow around the collective the same on every replica"
    )


def timeout(timeout_seconds: float, where: str) -> CollectiveTimeoutError:
    """Returns the error for replicas of which none has moved for too long."""
    return CollectiveTimeoutError(
        f"no replica moved for timeout_seconds={timeout_seconds}:\n{where}\n"
        "raise the timeout in CommunicationOptions, or find what keeps the replica. Where the "
        f"threads stand:\n{stacks()}"
    )
