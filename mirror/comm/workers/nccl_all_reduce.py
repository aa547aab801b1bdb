"""NcclAllReduce: sums over the replicas of all workers on their GPUs, with one NCCL clique.

[Note: Sums on GPUs]
Every replica of every worker is an NCCL rank, so NCCL uses all links: NVLink in a machine, and all
network cards between machines. NCCL hangs if sizes differ, so the workers also exchange what they
sum. Enqueued sums have the interface of torch.distributed's works, so [Note: Nobody hangs]
applies: an error aborts the clique, which ends its kernels.

The first sum of a size makes NCCL connect inside the call. If a worker is lost at that moment,
the others find out after ``timeout_seconds``.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from mirror.comm.nccl import libnccl
from mirror.comm.nccl.calls import all_reduce_calls
from mirror.comm.nccl.clique import Clique
from mirror.comm.nccl.communicators import RankRange, new_identifier
from mirror.comm.nccl.nccl_backend import NcclCommunicator, seconds_to_get_ready
from mirror.comm.workers.monitored_wait import TIMED_OUT
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.device.events import Event, record_event
from mirror.device.machine_facts import facts_of_gpu
from mirror.device.side_streams import SideStream

_PAUSE_SECONDS = 50e-6

_logger = logging.getLogger("mirror")


class PendingSum:
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


class NcclAllReduce:
    """The sums of one strategy.

    Args:
        clique: whose ranks are the replicas of all workers.
        devices: this worker's.
    """

    def __init__(self, clique: Clique, devices: Sequence[torch.device]) -> None:
        self._clique, self._devices = clique, tuple(devices)
        self._side = SideStream(self._devices)

    def begin(self, what: str, buffers: Sequence[Tensor]) -> PendingSum:
        """Begins to sum flat buffers, one per local replica, in place.

        The buffers must be kept until the sum is done.
        """
        calls = all_reduce_calls(buffers, "sum")
        join = self._side.start(lambda: self._clique.run(what, calls))
        return PendingSum(self._clique, self._devices, join)

    def close(self) -> None:
        """Ends the clique, without waiting for what is on its way; idempotent."""
        self._side.close()
        self._clique.abandon()


def negotiate_nccl(
    workers: LocalWorkerGroup, devices: Sequence[torch.device], seconds: float
) -> NcclAllReduce | None:
    """Makes the sums over the GPUs of several workers, if all can; all call it.

    Args:
        seconds: what a sum may take.

    Raises:
        BackendError, CollectiveTimeoutError: NCCL refuses, or has not got ready.
    """
    reason = NcclCommunicator.unavailable_reason(devices)
    library = None if reason else libnccl.library()
    own = {
        "reason": reason,
        "version": library and library.version,
        "gpus": [[platform.node(), *facts_of_gpu(device)] for device in devices],
        "identifier": new_identifier(library).hex() if library and workers.rank == 0 else "",
    }
    said = workers.exchange("which GPUs there are", None, lambda: json.dumps(own).encode())
    every: list[dict[str, Any]] = [json.loads(one) for one in said]
    why = _why_not(every)
    if why is not None or library is None:
        level = logging.WARNING if devices[0].type == "cuda" else logging.INFO
        _logger.log(level, "gradients go to other workers by gloo, in host memory: %s", why)
        return None
    _logger.info("gradients of all workers are summed by NCCL, over %d GPUs", workers.num_replicas)
    place = RankRange(
        workers.replica_offset, workers.num_replicas, bytes.fromhex(every[0]["identifier"])
    )
    clique = Clique(library, devices, seconds, seconds_to_get_ready(seconds), place)
    return NcclAllReduce(clique, devices)


def _why_not(every: Sequence[dict[str, Any]]) -> str | None:
    """Returns why NCCL cannot serve all workers, from what each has said."""
    for rank, one in enumerate(every):
        if one["reason"]:
            return f"worker {rank}: {one['reason']}"
    versions = [one["version"] for one in every]
    if len(set(versions)) > 1:
        names = ", ".join(map(libnccl.version_name, versions))
        return f"the workers have unlike versions of NCCL: {names}"
    seen: dict[tuple[str, ...], int] = {}
    for rank, one in enumerate(every):
        for gpu in map(tuple, one["gpus"]):
            if gpu in seen:
                return f"workers {seen[gpu]} and {rank} share a GPU, which NCCL refuses"
            seen[gpu] = rank
    return None
