"""SeveralCalls: one backward pass outside ``run`` through calls that count differently."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.execution.runner import Runner
from mirror.replica.multi_worker.pass_weights import PassWeights
from mirror.threads.user_frames import warn_user


class SeveralCalls:
    """Tells of passes whose calls have unlike proportions on the workers.

    A worker's pass outside ``run`` has one weight, that of its last call: see [Note: Shares of
    workers]. With calls of other sizes in the same pass that is right if all workers have the same
    proportions; else the gradient is not that of one device, and nobody would see it.
    """

    def __init__(self, workers: LocalWorkerGroup, runner: Runner) -> None:
        self._workers, self._runner = workers, runner
        self._has_told = False

    def differ(self, weights: PassWeights) -> bool:
        """Whether the calls since the last reduction have counted differently on this worker."""
        counted = self._workers.run_weights
        is_outside = self._runner.running is None and weights.total is not None
        return is_outside and not self._has_told and len(set(counted)) > 1

    def compare(self) -> None:
        """Warns once if the workers' proportions differ; called by all of them."""
        counted = self._workers.run_weights
        said = self._workers.exchange(
            "what the calls of a pass count for",
            payload=lambda: struct.pack(f"<{len(counted)}d", *counted),
        )
        every = [struct.unpack(f"<{len(mine) // 8}d", mine) for mine in said]
        if self._has_told or len(set(map(_proportions, every))) == 1:
            return
        self._has_told = True
        told = "; ".join(
            f"worker {w}: {', '.join(f'{weight:g}' for weight in mine)}"
            for w, mine in enumerate(every)
        )
        warn_user(
            "outside run a worker's backward pass counts with the examples of its last call of a "
            "mirrored module, and since the last reduction there were several, in proportions "
            f"that differ between the workers ({told}); if one loss is made of them, its gradient "
            "is not that of one device. Call the model once per backward pass, with the same "
            "proportions on all workers, or train inside strategy.run"
        )

    def forget(self) -> None:
        """Begins anew: what follows is another pass."""
        self._workers.run_weights.clear()


def _proportions(weights: Sequence[float]) -> tuple[float, ...]:
    largest = max(weights, default=0.0) or 1.0
    return tuple(round(weight / largest, 9) for weight in weights)
