"""The current replica of a thread and the stack of contexts around it; thread-local.

Each context is a strategy in its cross-replica context (its scope, or a merge) or one of its
replicas. If the stack is empty, no strategy is current.

[Note: Interrupts]
Problem: Ctrl-C, like any exception thrown into a thread, comes at the start or the return of a
function, never between instructions that call nothing. It may come before the ``try``, or inside
the code that leaves a context.
Rule:    the old state is fetched before ``try``; the new state is entered inside it
         ``finally`` restores it by plain assignments in the same frame, without a call
         where calls are needed, a flag is set before and cleared after; the next user of a
         flagged object recovers it
        before = save_context()
        try:
            push_context(strategy, replica)
        finally:
            current.replica, current.strategy, current.below = before
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mirror.device.device_mesh import DeviceRemap
from mirror.errors import StrategyError
from mirror.execution.replicas import Replica, Replicas

Context = tuple["Replica | None", Any, Any]  # a replica, a strategy, and the context below


class _Current(threading.local):
    """The top context of the calling thread's stack, in separate fields for fast access.

    Attributes:
        replica: the current replica, ``None`` outside ``run``.
        strategy: the current strategy, ``None`` if there is none.
        below: the rest of the stack.
        in_whole_call: whether a mirrored module, and all that it calls, runs unsplit.
        stepping: the optimizers whose steps are in progress in this thread, outermost first.
    """

    replica: Replica | None
    strategy: Any
    below: Context | None
    in_whole_call: bool
    stepping: tuple[Any, ...]

    def __init__(self) -> None:
        # Not as class attributes: before torch 2.11, torch.compile takes these for the values.
        self.replica = self.strategy = self.below = None
        self.in_whole_call, self.stepping = False, ()


current = _Current()


def replica_of(replicas: Replicas) -> Replica | None:
    """Returns the current replica if it is one of these, else ``None``."""
    replica = current.replica
    return replica if replica is not None and replica.replicas is replicas else None


def is_active_in(replicas: Replicas) -> bool:
    """Whether this thread belongs to one of these replicas, which may be merging."""
    if replica_of(replicas) is not None:
        return True
    below = current.below
    while below is not None:
        replica, _, below = below
        if replica is not None and replica.replicas is replicas:
            return True
    return False


def enclosing_replica() -> Replica | None:
    """Returns the innermost replica, of any strategy, that this thread belongs to."""
    replica, below = current.replica, current.below
    while replica is None and below is not None:
        replica, _, below = below
    return replica


def check_current(replica: Replica) -> None:
    """Raises StrategyError unless the calling code is this replica's."""
    if current.replica is not replica and not replica.run.is_default:
        raise StrategyError(
            "this replica context belongs to a run that has ended, or to another replica or "
            "thread; call mirror.get_replica_context() where you need it"
        )


def save_context() -> Context:
    """Returns the current context, to be restored later. See [Note: Interrupts]."""
    return current.replica, current.strategy, current.below


def push_context(strategy: Any, replica: Replica | None) -> None:
    """Makes a strategy's replica current, or its cross-replica context with ``None``."""
    current.below = current.replica, current.strategy, current.below
    current.replica, current.strategy = replica, strategy


def renaming(replica: Replica) -> AbstractContextManager[object]:
    """Returns a context that maps device names in a replica's code to its own. [Note: Places].

    Applies if replicas have several devices each.
    """
    replicas = replica.replicas
    if replica.replica_id == 0:
        return nullcontext()
    names = replicas.places.names(replica.replica_id)
    return DeviceRemap(names, lambda: replica_of(replicas) is not None)


def refuse_within_another(replicas: Replicas, what: str) -> None:
    """Raises StrategyError inside ``run`` of another strategy.

    N replicas run the same code, so they would train this strategy's model N times, each time on
    a part of the batch. A strategy that a replica has created itself is excepted.
    """
    replica = current.replica
    if replica is None or replica.replicas is replicas or replicas.is_nested:
        return
    if replica.replicas.num_replicas > 1:
        raise StrategyError(
            f"{what} of {replicas.strategy!r} was called inside run of "
            f"{replica.replicas.strategy!r}, once by every replica there; mirror both models with "
            "one strategy, or call it outside run, or in "
            "mirror.get_replica_context().merge_call(fn)"
        )
