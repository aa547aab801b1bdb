"""Comparing the replicas bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mirror.errors import ReplicaMismatchError
from mirror.replica.bits import same_bits

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup


def compare_replicas(group: ReplicaGroup) -> int:
    """Compares parameters and optimizer state; returns the number of parameters.

    Raises:
        ReplicaMismatchError: naming the first variable and replica that differ.
    """
    group.prepare()
    with torch.inference_mode(False), torch.no_grad():
        for variable in group.variables:
            first = variable.targets[0]
            for r, target in enumerate(variable.targets):
                if not same_bits(first, target):
                    raise ReplicaMismatchError(
                        f"parameter {variable.name!r} differs on {group.names[r]} from "
                        f"{group.names[0]}; replicas must hold the same bits: look for a write "
                        "inside run that is not the same on all replicas"
                    )
        group.optimizers.check()
    return len(group.parameters())
