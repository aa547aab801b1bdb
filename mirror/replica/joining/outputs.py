"""The outputs of a split call, joined into what one device would have returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from mirror.errors import StructureError
from mirror.execution.runner import Runner
from mirror.replica.joining.arguments import ReplicaArgs
from mirror.replica.joining.joiner import Gatherer
from mirror.values import map_structure


def join_outputs(
    runner: Runner,
    results: dict[int, Any],
    sizes: Sequence[float],
    parts: Sequence[ReplicaArgs] = (),
    module: nn.Module | None = None,
) -> Any:
    """Joins the replicas' outputs into what one device would have returned.

    Tensors whose first dimension is the replica's number of examples are concatenated, 0-d
    floating ones become the example-weighted mean (or what their graphs tell, of a split call),
    equal other leaves stay; the rest becomes PerReplica. Differentiable.

    Args:
        parts: what the replicas were handed, of a split call. Its arguments come out as
            themselves, and objects that hold the batch are joined, too.
        module: what the split call was of.

    Raises:
        StructureError: the replicas' outputs differ in structure.
    """
    joiner = Gatherer(runner, sizes, list(results), parts, module)
    try:
        return map_structure(joiner.output, *results.values())
    except StructureError as error:
        raise StructureError(
            f"the replicas' outputs of a split call differ in structure: {error}; return the same "
            "structure for every part of a batch"
        ) from None
