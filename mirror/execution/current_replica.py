"""Which replica is current, and the contexts around it; thread-local.

A thread's contexts form a stack. Each is a strategy in its cross-replica context (its scope, or a
merge) or one of its replicas. With an empty stack no strategy is current.

[Note: Interrupts]
Ctrl-C, and whatever else one thread may raise in another, comes where a function begins or has
returned: also between what enters a context and the ``try`` that is to leave it, and in what
leaves it. But never between instructions that call nothing. So:

    what is entered    is entered inside the ``try``; what was there before is fetched ahead of it
    what is left       is left by assignments in ``finally``, of what was there before, in the
                       frame itself: no call, nothing for an interrupt to come between
    what takes calls   is marked as unfinished ahead, by an assignment, and the mark taken off when
                       all is well: who finds it, be it in the next use, puts things right

        before = here()
        try:
            enter(strategy, replica)
            ...
        finally:
            current.replica, current.strategy, current.below = before
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mirror.device.device_remap import DeviceRemap
from mirror.errors import StrategyError
from mirror.execution.replicas import Replica, Replicas

Context = tuple["Replica | None", Any, Any]  # a replica, a strategy, and what is below


class _Current(threading.local):
    """The context on top of the calling thread's stack, spread out for fast access.

    Attributes:
        replica: the current replica, ``None`` outside ``run``.
        strategy: the current strategy, ``None`` where there is none.
        below: the context below, and what is below that.
        in_whole_call: whether a mirrored module runs unsplit, and all it calls with it.
    """

    replica: Replica | None
    strategy: Any
    below: Context | None
    in_whole_call: bool

    def __init__(self) -> None:
        # Not as defaults of the class, which torch.compile takes for the values before torch 2.11.
        self.replica = self.strategy = self.below = None
        self.in_whole_call = False


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
    """Raises StrategyError but to code of this replica."""
    if current.replica is not replica and not replica.run.is_default:
        raise StrategyError(
            "this replica context belongs to a run that has ended, or to another replica or "
            "thread; call mirror.get_replica_context() where you need it"
        )


def save_context() -> Context:
    """Returns what is to be current again. See [Note: Interrupts]."""
    return current.replica, current.strategy, current.below


def push_context(strategy: Any, replica: Replica | None) -> None:
    """Makes a strategy's replica current, or its cross-replica context with ``None``."""
    current.below = current.replica, current.strategy, current.below
    current.replica, current.strategy = replica, strategy


def renaming(replica: Replica) -> AbstractContextManager[object]:
    """Has the devices that a replica's code names in this thread mean its own. [Note: Places].

    Where replicas have several devices each.
    """
    replicas = replica.replicas
    if replica.replica_id == 0:
        return nullcontext()
    names = replicas.places.names(replica.replica_id)
    return DeviceRemap(names, lambda: replica_of(replicas) is not None)


def refuse_within_another(replicas: Replicas, what: str) -> None:
    """Raises StrategyError inside ``run`` of another strategy, whose variables it may only read.

    A replica is one of N that run the same code, so another strategy's model would be trained N
    times over, each time on a part of the batch. A strategy that a replica has made itself is its
    own.
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
