"""Embeddings with ``max_norm``, whose forward writes to the weight the rows it looks up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirror.replica.run import ReplicaContext


def renormalizes(module: nn.Module) -> bool:
    """Whether calling the module renormalizes rows of its weight."""
    is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return is_embedding and module.max_norm is not None


def renormalize_everywhere(module: Any, context: ReplicaContext, indices: Tensor) -> None:
    """Renormalizes, on every replica alike, the rows that any replica is about to look up.

    A collective: all replicas must call the module.
    """
    rows = torch.unique(context.all_gather(indices.detach().reshape(-1)))
    with torch.no_grad():
        torch.embedding_renorm_(module.weight.detach(), rows, module.max_norm, module.norm_type)
