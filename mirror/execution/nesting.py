"""What replicas of one strategy may do with the variables of another: read them, not train them.

A replica is one of N that run the same code, so another strategy's model would be trained N times
over, each time on a part of the batch. A strategy that a replica has made itself is its own.
"""

from __future__ import annotations

from mirror.errors import StrategyError
from mirror.execution.current import current
from mirror.execution.replicas import Replicas


def refuse_within_another(replicas: Replicas, what: str) -> None:
    """Raises StrategyError inside ``run`` of another strategy."""
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
