"""Embeddings with ``max_norm``: their forward writes the rows of the weight that it looks up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirror.base.dynamo import disable_dynamo
from mirror.execution.replicas import Replica
from mirror.replica.collectives.collectives import all_gather

MOST_ROUNDS = 8


def renormalizes(module: nn.Module) -> bool:
    """Returns whether calling the module renormalizes rows of its weight."""
    is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return is_embedding and module.max_norm is not None


@disable_dynamo
def renormalize_everywhere(module: Any, replica: Replica, indices: Tensor) -> None:
    """Renormalizes, on every replica, the rows that any replica is about to look up.

    This is a collective: all replicas must call the module.

    Raises:
        CompileError: a step is being traced, but the number of rows depends on values.
    """
    if replica.tracing is not None:
        replica.tracing.refuse(
            f"{type(module).__name__}(max_norm={module.max_norm}), which writes the rows that it "
            "looks up,",
            "leave max_norm out and bound the rows of the weight after the step",
        )
    rows = torch.unique(all_gather(replica, indices.detach().reshape(-1)))
    weight = module.weight.detach()
    with torch.no_grad():
        # Rounding may leave a norm above the bound, and the module's own call would then shrink
        # it on this replica only: repeat until nothing changes.
        for _ in range(MOST_ROUNDS):
            before = weight[rows]
            torch.embedding_renorm_(weight, rows, module.max_norm, module.norm_type)
            if torch.equal(weight[rows], before):
                break
