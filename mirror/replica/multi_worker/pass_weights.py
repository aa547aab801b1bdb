"""Weights of backward passes among several workers.

[Note: Shares of workers]
Outside ``run`` a worker has the role that a replica has inside: its pass starts from its own loss,
which counts with the worker's weight, the sum of its replicas' weights in its last outermost run.
So with several workers

    inside run       replica r counts ``w_r / R``
    outside          every local gradient counts ``W / R``, with the worker's weight W

Weights change from batch to batch, so the total T of all workers is unknown until gradients have
travelled. R is a total that all workers know, the one of the pass before. The worker's weight
travels in the trailer of the first bucket, and the reduced gradients are multiplied by ``R / T``:
exactly 1 except for ragged batches, and then skipped. Before the first pass R is exchanged with
the order of the buckets. Under ``no_sync`` the gradients of several passes are added; each pass
has its own total, which is exchanged at the end of the pass.

With ``gradient_reduction="sum"`` every gradient counts 1, and there is no total.

A worker without examples counts 0: see ``params/workers_without_examples.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from torch import Tensor

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.execution.runner import Runner
from mirror.replica.gradients.ready_grads import DeferredGrads
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.threads.user_frames import warn_user


class PassWeights(dict[int, float]):
    """The weight of each replica's gradient in a pass, by replica.

    Attributes:
        total: the worker's weight; ``None`` if gradients are summed unweighted.
    """

    def __init__(self, by_replica: Mapping[int, float], total: float | None) -> None:
        super().__init__(by_replica)
        self.total = total

    def shares(self, total: float) -> dict[int, float]:
        """Returns the weights divided by a total over all workers; zeros if that is 0."""
        if self.total is None:
            return dict(self)
        return {r: weight / total if total else 0.0 for r, weight in self.items()}


class Deferred(DeferredGrads):
    """Deferred gradients; true even if the worker's deferred passes had no gradients.

    Attributes:
        has_passes: whether passes were deferred, which is the same on all workers.
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
        """Drops all deferred gradients."""
        self.has_passes = False
        self.clear()


class SeveralCalls:
    """Detects passes through several calls in proportions that differ between workers.

    A worker's pass outside ``run`` has one weight, that of its last call, see
    [Note: Shares of workers]. If the pass contains calls with other numbers of examples, that is
    right only if the calls have the same proportions on all workers. Otherwise the gradient
    differs from that of one device, and a warning is issued.
    """

    def __init__(self, workers: LocalWorkerGroup, runner: Runner) -> None:
        self._workers, self._runner = workers, runner
        self._has_warned = False

    def differ(self, weights: PassWeights) -> bool:
        """Whether this worker's calls since the last reduction have had different weights."""
        counted = self._workers.run_weights
        is_outside = self._runner.running is None and weights.total is not None
        return is_outside and not self._has_warned and len(set(counted)) > 1

    def compare(self) -> None:
        """Warns once if the workers' proportions differ; all workers call this."""
        counted = self._workers.run_weights
        payloads = self._workers.exchange(
            "what the calls of a pass count for",
            payload=lambda: struct.pack(f"<{len(counted)}d", *counted),
        )
        every = [struct.unpack(f"<{len(payload) // 8}d", payload) for payload in payloads]
        if self._has_warned or len(set(map(_proportions, every))) == 1:
            return
        self._has_warned = True
        listed = "; ".join(
            f"worker {w}: {', '.join(f'{weight:g}' for weight in weights)}"
            for w, weights in enumerate(every)
        )
        warn_user(
            "outside run a worker's backward pass counts with the examples of its last call of a "
            "mirrored module, and since the last reduction there were several, in proportions "
            f"that differ between the workers ({listed}); if one loss is made of them, its "
            "gradient is not that of one device. Call the model once per backward pass, with the "
            "same proportions on all workers, or train inside strategy.run"
        )

    def forget(self) -> None:
        """Clears the recorded calls when a pass has been reduced."""
        self._workers.run_weights.clear()


def _proportions(weights: Sequence[float]) -> tuple[float, ...]:
    largest = max(weights, default=0.0) or 1.0
    return tuple(round(weight / largest, 9) for weight in weights)
