"""Weights: what a pass counts for among the passes of all workers.

[Note: Shares of workers]
Outside ``run`` a worker is to the other workers what a replica is to the others inside: its pass
starts from its own loss, which counts with the worker's weight, the sum of its replicas' weights
in its last outermost run. So among several workers

    inside run       replica r counts ``w_r / R``
    outside          every local summand counts ``W / R``, with the worker's weight W

Nobody knows the total T of all workers before gradients have travelled, as weights change from
batch to batch. R is a total that all know, that of the pass before; the worker's weight travels
in the tail of the first bucket, and what has arrived is multiplied by ``R / T``: exactly 1 for
all but ragged batches, and then left out. Before the first pass R is exchanged, with the order of
buckets. Under ``no_sync`` the summands of several passes are added up, each of which has a total
of its own: that is exchanged for every pass, and takes the place of a reduction.

Gradients that are plain sums (``gradient_reduction="sum"``) count 1, and have no total.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mirror.replica.gradients.ready_grads import DeferredGrads
from mirror.replica.params.replicated_param import ReplicatedParam


class PassWeights(dict[int, float]):
    """What the gradient of each replica counts for, by replica.

    Attributes:
        total: what the worker counts for; ``None`` for plain sums.
    """

    def __init__(self, by_replica: Mapping[int, float], total: float | None) -> None:
        super().__init__(by_replica)
        self.total = total

    def shares(self, total: float) -> dict[int, float]:
        """Returns the shares in a total of all workers; zeros in nothing."""
        if self.total is None:
            return dict(self)
        return {r: weight / total if total else 0.0 for r, weight in self.items()}


class Deferred(DeferredGrads):
    """Deferred gradients; also of a worker whose passes have counted nothing.

    Attributes:
        has_passes: whether passes have been kept back, on all workers then.
    """

    has_passes = False

    def is_sparse(self, variable: ReplicatedParam) -> bool:
        """Whether a summand of a variable is sparse."""
        kept = self.get(variable) or ()
        return any(summand is not None and summand.is_sparse for summand in kept)

    def pop_dense(self, variable: ReplicatedParam) -> list[Tensor | None] | None:
        """Removes and returns a variable's summands; ``None``: none, or some are sparse."""
        return None if self.is_sparse(variable) else self.pop(variable, None)

    def __bool__(self) -> bool:
        return self.has_passes

    def release(self) -> None:
        """Forgets all there is."""
        self.has_passes = False
        self.clear()
