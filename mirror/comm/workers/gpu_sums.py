"""GpuSums: sums over the replicas of all workers on their GPUs, by one clique of NCCL's.

[Note: Sums on GPUs]
Every replica of every worker is a rank of its own, so NCCL finds all links there are: NVLink in a
machine, all network cards between. Workers tell each other, beside, what they sum: where sizes
differ NCCL itself waits in vain. What is enqueued is waited for as a work of torch.distributed is,
so [Note: Nobody hangs] holds: an error that is found ends the clique, and with it its kernels.

A first sum of a size has NCCL connect, within the call: a worker that is lost at that moment is
found after ``timeout_seconds``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep

import torch
from torch import Tensor

from mirror.accelerator.events import Event, record_event
from mirror.accelerator.streams import Side
from mirror.comm.nccl.calls import all_reduce_calls
from mirror.comm.nccl.clique import Clique
from mirror.comm.workers.errand import TIMED_OUT

_PAUSE_SECONDS = 50e-6


class Sum:
    """A sum on its way."""

    def __init__(
        self, clique: Clique, devices: Sequence[torch.device], join: Callable[[], None]
    ) -> None:
        self._clique, self._devices, self._join = clique, devices, join
        self._events: Sequence[Event] | None = None

    def wait(self, timeout: timedelta) -> None:
        """Returns when the devices are done with it.

        Raises:
            BackendError, CollectiveTimeoutError: NCCL has failed.
            RuntimeError: it is not done yet, see ``TIMED_OUT``.
        """
        if self._events is None:
            self._join()
            self._events = [record_event(device) for device in self._devices]
        end = monotonic() + timeout.total_seconds()
        while not all(event.query() for event in self._events):
            self._clique.check()
            if monotonic() > end:
                raise RuntimeError(f"the sum {TIMED_OUT}")
            sleep(_PAUSE_SECONDS)
        self._clique.check()


class GpuSums:
    """The sums of one strategy.

    Args:
        clique: whose ranks are the replicas of all workers.
        devices: this worker's.
    """

    def __init__(self, clique: Clique, devices: Sequence[torch.device]) -> None:
        self._clique, self._devices = clique, tuple(devices)
        self._side = Side(self._devices)

    def begin(self, what: str, buffers: Sequence[Tensor]) -> Sum:
        """Begins to sum flat buffers, one per local replica, in place.

        The buffers must be kept until the sum is done.
        """
        calls = all_reduce_calls(buffers, "sum")
        join = self._side.start(lambda: self._clique.run(what, calls))
        return Sum(self._clique, self._devices, join)

    def close(self) -> None:
        """Ends the clique, without waiting for what is on its way; idempotent."""
        self._side.close()
        self._clique.abandon()
