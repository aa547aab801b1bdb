"""Claim: of several threads that start a run of one group at once, one has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from mirror.errors import StrategyError
from mirror.execution.current import current

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup

P = ParamSpec("P")
T = TypeVar("T")


def by_one_thread(
    run: Callable[Concatenate[ReplicaGroup, P], T],
) -> Callable[Concatenate[ReplicaGroup, P], T]:
    """Has one thread at a time run a group's method; the others' calls raise StrategyError.

    What a replica of the group calls, in a merge, belongs to the run going on; what it calls in a
    parallel pass waits for the others there.
    """

    @wraps(run)
    def claimed(group: ReplicaGroup, /, *args: P.args, **kwargs: P.kwargs) -> T:
        belongs = group.running is not None and _is_inside(group)
        if belongs or group.parallel_pass is not None:
            return run(group, *args, **kwargs)
        thread = get_ident()
        # One step, whoever comes at the same moment. A claim of its own an interrupt has left.
        if group.claims.setdefault("run", thread) != thread:
            raise StrategyError(
                "run was called while another thread's run of the same strategy is going on; call "
                "it when that has returned, or give each thread a strategy of its own"
            )
        try:
            return run(group, *args, **kwargs)
        finally:
            group.claims.clear()

    return claimed


def _is_inside(group: ReplicaGroup) -> bool:
    replica = current.replica
    return (replica is not None and replica.group is group) or group.inside_merge()
