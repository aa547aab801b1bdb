"""What replicas of one strategy may do with the variables of another: read them, not train them.

A replica is one of N that run the same code, so another strategy's model would be trained N times
over, each time on a part of the batch. A strategy that a replica has made itself is its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mirror.errors import StrategyError
from mirror.execution.current import current

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup


def refuse_within_another(group: ReplicaGroup, what: str) -> None:
    """Raises StrategyError inside ``run`` of another strategy."""
    replica: Any = current.replica
    if replica is None or replica.group is group or group.is_nested:
        return
    if replica.group.num_replicas > 1:
        raise StrategyError(
            f"{what} of {group.strategy!r} was called inside run of {replica.strategy!r}, once by "
            "every replica there; mirror both models with one strategy, or call it outside run, "
            "or in mirror.get_replica_context().merge_call(fn)"
        )
