"""Backward passes of a worker without examples: they start from a parameter, with weight 0.

The worker runs with the empty part, at weight 0, since the other workers wait for it in
collectives. Where the examples choose which layers are called, none is called for an empty part.
The loss then has no graph, or none that leads to a parameter, and its pass brings no gradient. So
the smallest parameter gets zeros from it, of weight 0: they change no gradient, and what no other
worker has a gradient of keeps ``None``. See ``flags`` in ``multi_worker/worker_bucket.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mirror.execution.replicas import Replicas, WeakReplicaMap
from mirror.execution.run import current
from mirror.replica.params.replicated_param import ReplicatedParam


class TrainedParams(Protocol):
    """The parameters that replicas of several workers train."""

    @property
    def replicas(self) -> Replicas:
        """The replicas of this worker."""

    def smallest_trained(self) -> ReplicatedParam | None:
        """Returns the parameter with the fewest elements, ``None`` if none is trained."""


trained_params: WeakReplicaMap[TrainedParams] = WeakReplicaMap()


def zeros_to_differentiate(replicas: Replicas) -> Tensor:
    """Returns a leaf of shape (); of a worker without examples, zero times a parameter.

    Called in the cross-replica context.
    """
    if not replicas.workers.weight:
        variable = trained_params.get(replicas).smallest_trained()
        if variable is not None:
            return variable.copies[0].flatten()[:1].sum().real * 0
    return torch.zeros((), requires_grad=True)


def start_without_examples(outputs: Sequence[Any], grads: Any, *rest: Any) -> tuple[Any, ...]:
    """Returns the arguments of a backward pass that starts from a parameter instead of a loss.

    Those given are returned if a loss has a graph, or this worker or replica has examples.
    """
    if any(getattr(output, "requires_grad", True) for output in outputs):
        return outputs, grads, *rest
    replica = current.replica
    for trained in trained_params.all():
        replicas = trained.replicas
        if replica is None:
            replica_id, weight = 0, replicas.workers.weight
        elif replica.replicas is replicas:
            replica_id, weight = replica.replica_id, replica.weight
        else:
            continue
        variable = None if weight else trained.smallest_trained()
        if variable is not None:
            copy = variable.copies[replica_id]
            retain, create, _, *others = rest
            with torch.no_grad():
                return (copy,), (torch.zeros_like(copy),), retain, create, (), *others
    return outputs, grads, *rest
