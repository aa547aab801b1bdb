"""Which replica is current, and the contexts around it; thread-local.

A thread's contexts form a stack of frames. A frame is a strategy in its cross-replica context
(its scope, or a merge) or one of its replicas. With an empty stack no strategy is current.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mirror.errors import StrategyError
from mirror.execution.replicas import Replica, Replicas


class _Current(threading.local):
    """The frame on top of the calling thread's stack, spread out for fast access.

    Attributes:
        replica: the current replica, ``None`` outside ``run``.
        strategy: the current strategy, ``None`` where there is none.
        stack: the frames below, innermost last.
        in_whole_call: whether a mirrored module runs unsplit, and all it calls with it.
    """

    replica: Replica | None
    strategy: Any
    in_whole_call: bool

    def __init__(self) -> None:
        # Not as defaults of the class, which torch.compile takes for the values before torch 2.11.
        self.replica = self.strategy = None
        self.in_whole_call = False
        self.stack: list[tuple[Replica | None, Any]] = []


current = _Current()


def replica_of(replicas: Replicas) -> Replica | None:
    """Returns the current replica if it is one of these, else ``None``."""
    replica = current.replica
    return replica if replica is not None and replica.replicas is replicas else None


def is_inside(replicas: Replicas) -> bool:
    """Whether this thread belongs to one of these replicas, which may be merging."""
    if replica_of(replicas) is not None:
        return True
    return any(frame is not None and frame.replicas is replicas for frame, _ in current.stack)


def check_current(replica: Replica) -> None:
    """Raises StrategyError but to code of this replica."""
    if current.replica is not replica and not replica.run.is_default:
        raise StrategyError(
            "this replica context belongs to a run that has ended, or to another replica or "
            "thread; call mirror.get_replica_context() where you need it"
        )


@contextmanager
def entered(strategy: Any, replica: Replica | None) -> Iterator[None]:
    """Makes a strategy's replica current, or its cross-replica context with ``None``."""
    enter(strategy, replica)
    try:
        yield
    finally:
        leave()


def enter(strategy: Any, replica: Replica | None) -> None:
    current.stack.append((current.replica, current.strategy))
    current.replica, current.strategy = replica, strategy


def leave() -> None:
    current.replica, current.strategy = current.stack.pop()
