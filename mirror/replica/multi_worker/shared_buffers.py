"""Buffers over workers: what runs have changed is combined over all of them when a run ends."""

from __future__ import annotations

import torch

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.replica.params.buffers import Buffers


class SharedBuffers:
    """Combines buffers over workers.

    Where runs end: there every worker is, and reading, for a file of the chief's say, is local.
    """

    def __init__(self, workers: LocalWorkerGroup, buffers: Buffers) -> None:
        self._workers, self._buffers = workers, buffers

    def share(self) -> None:
        """Combines what the last run may have changed; called by all workers."""
        changed = [buffer for buffer in self._buffers if buffer.must_be_shared()]
        if not changed:
            return
        with torch.inference_mode(False), torch.no_grad():
            own = [buffer.own_part() for buffer in changed]
            signature = [
                (buffer.name, buffer.aggregation, str(value.dtype), tuple(value.shape))
                for buffer, (value, _) in zip(changed, own, strict=True)
            ]
            counts = [float(count) for _, count in own]
            parcels = self._workers.exchange_tensors(
                f"{len(changed)} buffers that a run has changed",
                signature,
                [value for value, _ in own],
                [self._workers.weight, *counts],
            )
            # One without examples has run to be there where the others meet.
            with_examples = [said for said in parcels if said.numbers[0]] or parcels
            for i, buffer in enumerate(changed):
                said = parcels if buffer.aggregation == "sum" else with_examples
                buffer.share([(one.tensors[i], one.numbers[i + 1]) for one in said])
