"""Which replica is current, and the contexts around it; thread-local.

A thread's contexts form a stack of frames. A frame is a strategy in its cross-replica context
(its scope, or a merge) or one of its replicas. With an empty stack no strategy is current.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class ReplicaFrame(Protocol):
    """What the layers below the strategy need to know of the current replica."""

    group: Any
    replica_id: int


class _Current(threading.local):
    """The frame on top of the calling thread's stack, spread out for fast access.

    Attributes:
        replica: the current replica, ``None`` outside ``run``.
        strategy: the current strategy, ``None`` where there is none.
        stack: the frames below, innermost last.
        in_whole_call: whether a mirrored module runs unsplit, and all it calls with it.
    """

    replica: ReplicaFrame | None
    strategy: Any
    in_whole_call: bool

    def __init__(self) -> None:
        # Not as defaults of the class, which torch.compile takes for the values before torch 2.11.
        self.replica = self.strategy = None
        self.in_whole_call = False
        self.stack: list[tuple[ReplicaFrame | None, Any]] = []


current = _Current()


@contextmanager
def entered(strategy: Any, replica: ReplicaFrame | None) -> Iterator[None]:
    """Makes a strategy's replica current, or its cross-replica context with ``None``."""
    enter(strategy, replica)
    try:
        yield
    finally:
        leave()


def enter(strategy: Any, replica: ReplicaFrame | None) -> None:
    current.stack.append((current.replica, current.strategy))
    current.replica, current.strategy = replica, strategy


def leave() -> None:
    current.replica, current.strategy = current.stack.pop()
