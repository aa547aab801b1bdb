"""Shares: how much each replica's gradient counts.

[Note: Shares]
A backward pass inside ``run`` starts from each replica's own loss, the mean over its own
examples. Its gradient counts with the replica's share, ``weight / sum of weights`` ("mean": the
result of one device on the whole batch), or with 1 ("sum"). A backward pass in the cross-replica
context starts from the loss of the whole batch, so its local gradients are added unweighted. Under
``no_sync`` the shares of a run are applied when it ends, and the weighted gradients are kept in
``DeferredGrads`` until the next reduction.

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
from collections.abc import Sequence
from functools import cached_property

from mirror.execution.replicas import Replicas
from mirror.execution.run import Run, current
from mirror.execution.runner import Runner
from mirror.replica.gradients.ready_grads import common_scale
from mirror.threads.user_frames import warn_user


class PassWeights(dict[int, float]):
    """How much each replica's gradient of a pass counts, by replica.

    Attributes:
        total: the worker's weight, if these are weights, to be divided by the total of all
            workers; ``None`` if these are the shares.
    """

    total: float | None = None

    @cached_property
    def common(self) -> float | None:
        """The weight that all replicas have; ``None`` where they differ."""
        return common_scale(self)

    def shares(self, total: float) -> dict[int, float]:
        """Returns the weights divided by a total over all workers; zeros if that is 0."""
        if self.total is None:
            return dict(self)
        return {r: weight / total if total else 0.0 for r, weight in self.items()}


class Shares:
    """The weights of one strategy's backward passes, and their shares.

    Attributes:
        reference: a total that all workers know: that of the previous pass; 0 before the first.
    """

    def __init__(self, replicas: Replicas, runner: Runner) -> None:
        self._replicas, self._runner, self._workers = replicas, runner, replicas.workers
        self.reference = 0.0
        self._need_total = replicas.weighted and replicas.workers.is_multi_process
        self._weights_in_run: dict[int, float] = {}  # by replica; those of ``_last_in_run``
        self._last_in_run = self._last_outside = PassWeights()
        self._estimated: tuple[PassWeights, float, dict[int, float]] = PassWeights(), 0.0, {}

    def in_run(self, run: Run) -> PassWeights:
        """Returns the weights of backward passes inside a run."""
        weights = run.weights()
        if self._weights_in_run != weights:
            self._weights_in_run = weights
            if self._need_total:
                self._last_in_run = PassWeights(weights)
                self._last_in_run.total = float(sum(weights.values()))
            else:
                self._last_in_run = PassWeights(run.shares())
        return self._last_in_run

    def outside(self) -> PassWeights:
        """Returns the weights of backward passes in the cross-replica context."""
        weight = self._workers.weight
        if not self._need_total:
            weight = 1.0 if weight or not self._workers.is_multi_process else 0.0
        if self._last_outside.get(0) != weight:
            replica_ids = range(self._replicas.num_replicas)
            self._last_outside = PassWeights(dict.fromkeys(replica_ids, weight))
            self._last_outside.total = weight if self._need_total else None
        return self._last_outside

    def of_all(self) -> PassWeights | None:
        """Returns the weights of the pass that calls this, in a hook of a gradient.

        ``None`` if they are not certain, or if a replica is idle or counts nothing.
        """
        replica, running = current.replica, self._runner.running
        if (replica is None) != (running is None):
            return None
        if replica is None or running is None:
            weights = self.outside()
        elif replica.replicas is self._replicas:
            weights = self.in_run(running)
        else:
            return None
        is_whole = len(weights) == self._replicas.num_replicas and all(weights.values())
        return weights if is_whole else None

    def estimate(self, weights: PassWeights) -> dict[int, float]:
        """Returns shares in ``reference``. ``correct`` corrects the reduced gradients."""
        reference, known = self.reference, self._estimated
        if known[0] is not weights or known[1] != reference:
            known = self._estimated = weights, reference, weights.shares(reference)
        return known[2]

    def correct(self, total: float) -> float:
        """Returns the factor by which reduced gradients of estimated shares are too small.

        Args:
            total: the total of the pass, which is the next reference.
        """
        factor, self.reference = self.reference / total, total
        return factor

    def exchange(self, weights: PassWeights) -> dict[int, float]:
        """Returns shares in the total of this pass, which the workers exchange."""
        if weights.total is None:
            return dict(weights)
        mine = struct.pack("<d", weights.total)
        messages = self._workers.exchange("the weights of a pass", None, lambda: mine)
        return weights.shares(sum(struct.unpack("<d", message)[0] for message in messages))


class SeveralCalls:
    """Detects passes through several calls in proportions that differ between workers.

    A worker's pass outside ``run`` has one weight, that of its last call, see
    [Note: Shares of workers]. If the pass contains calls with other numbers of examples, that is
    right only if the calls have the same proportions on all workers. Otherwise the gradient
    differs from that of one device, and a warning is issued.
    """

    def __init__(self, replicas: Replicas, runner: Runner) -> None:
        self._workers, self._runner = replicas.workers, runner
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
