"""The arguments of a run: which replicas they let take part, and with what weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mirror.errors import StructureError
from mirror.values import PerReplica, leaves_of, present_in


def taking_part(num_replicas: int, *trees: Any) -> tuple[Sequence[int], Sequence[float] | None]:
    """Returns the replicas that have a part of every PerReplica, and their weights.

    Raises:
        StructureError: a PerReplica has a wrong number of parts, or nobody has all.
    """
    values = [leaf for leaf in leaves_of(trees) if isinstance(leaf, PerReplica)]
    for value in values:
        if len(value.values) != num_replicas:
            raise StructureError(
                f"a PerReplica of this strategy has {num_replicas} parts, one per replica; got "
                f"one with {len(value.values)}"
            )
    active = present_in(values)
    if active is None:
        return range(num_replicas), None
    if not active:
        raise StructureError("no replica has a part of every PerReplica argument of run")
    return active, next((v.weights for v in values if v.weights is not None), None)
