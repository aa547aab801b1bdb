"""NcclAllReduce: sums over the replicas of all workers on their GPUs, with one NCCL clique.

It also gathers the values that replicas have updated, with sharded optimizer state.

[Note: Sums on GPUs]
Every replica of every worker is an NCCL rank, so NCCL uses all links: NVLink in a machine, and all
network cards between machines. NCCL hangs if sizes differ, so the workers also exchange what they
sum. Enqueued sums have the interface of torch.distributed's works, so [Note: Monitored waits]
applies: an error aborts the clique, which ends its kernels.

NCCL connects inside the call of the first sum of a size. If a worker is lost at that moment, the
other workers notice it after ``timeout_seconds``.
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
from mirror.comm.nccl.clique import Clique, RankRange, new_identifier
from mirror.comm.nccl.libnccl import Call, all_gather_calls, all_reduce_calls
from mirror.comm.nccl.nccl_backend import NcclCommunicator, seconds_to_get_ready
from mirror.comm.workers.monitored_wait import TIMED_OUT
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.device.host import facts_of_gpu
from mirror.device.streams import Event, SideStream, record_event

_PAUSE_SECONDS = 50e-6

_logger = logging.getLogger("mirror")


class PendingSum:
    """A sum in flight."""

    def __init__(
        self, clique: Clique, devices: Sequence[torch.device], join: Callable[[], None]
    ) -> None:
        self._clique, self._devices, self._join = clique, devices, join
        self._events: Sequence[Event] | None = None

    def wait(self, timeout: timedelta) -> None:
        """Waits until the devices have finished the sum.

        Raises:
            BackendError, CollectiveTimeoutError: NCCL has failed.
            RuntimeError: the sum is not done after ``timeout``; see ``TIMED_OUT``.
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
        clique: its ranks are the replicas of all workers.
        devices: of this worker.
    """

    def __init__(self, clique: Clique, devices: Sequence[torch.device]) -> None:
        self._clique, self._devices = clique, tuple(devices)
        self._side = SideStream(self._devices)

    def start(self, what: str, buffers: Sequence[Tensor]) -> PendingSum:
        """Starts to sum flat buffers, one per local replica, in place.

        The caller keeps the buffers until the sum is done.
        """
        return self._start(what, all_reduce_calls(buffers, "sum"))

    def start_gather(
        self, what: str, buffers: Sequence[Tensor], first: int, num_replicas: int
    ) -> PendingSum:
        """Starts to copy every replica's section of flat buffers to all replicas, in place.

        The caller keeps the buffers until the gather is done.

        Args:
            first: the first local replica, of ``num_replicas`` of all workers.
        """
        return self._start(what, all_gather_calls(buffers, first, num_replicas))

    def _start(self, what: str, calls: Sequence[Call]) -> PendingSum:
        join = self._side.start(lambda: self._clique.run(what, calls))
        return PendingSum(self._clique, self._devices, join)

    def close(self) -> None:
        """Ends the clique without waiting for sums in flight; idempotent."""
        self._side.close()
        self._clique.abandon()


def negotiate_nccl(
    workers: LocalWorkerGroup, devices: Sequence[torch.device], seconds: float
) -> NcclAllReduce | None:
    """Returns sums over the GPUs of all workers, or None if a worker cannot; all must call it.

    Args:
        seconds: the limit of a sum.

    Raises:
        BackendError, CollectiveTimeoutError: NCCL fails, or does not start in time.
    """
    reason = NcclCommunicator.unavailable_reason(devices)
    library = None if reason else libnccl.nccl_library()
    own = {
        "reason": reason,
        "version": library and library.version,
        "gpus": [[platform.node(), *facts_of_gpu(device)] for device in devices],
        "identifier": new_identifier(library).hex() if library and workers.rank == 0 else "",
    }
    payloads = workers.exchange("which GPUs there are", None, lambda: json.dumps(own).encode())
    facts: list[dict[str, Any]] = [json.loads(payload) for payload in payloads]
    why = _unavailable_reason(facts)
    if why is not None or library is None:
        level = logging.WARNING if devices[0].type == "cuda" else logging.INFO
        _logger.log(level, "gradients go to other workers by gloo, in host memory: %s", why)
        return None
    _logger.info("gradients of all workers are summed by NCCL, over %d GPUs", workers.num_replicas)
    ranks = RankRange(
        workers.replica_offset, workers.num_replicas, bytes.fromhex(facts[0]["identifier"])
    )
    clique = Clique(library, devices, seconds, seconds_to_get_ready(seconds), ranks)
    return NcclAllReduce(clique, devices)


def _unavailable_reason(facts: Sequence[dict[str, Any]]) -> str | None:
    """Returns why NCCL cannot serve all workers, from the facts of each, or None."""
    for rank, own in enumerate(facts):
        if own["reason"]:
            return f"worker {rank}: {own['reason']}"
    versions = [own["version"] for own in facts]
    if len(set(versions)) > 1:
        names = ", ".join(map(libnccl.version_name, versions))
        return f"the workers have different versions of NCCL: {names}"
    seen: dict[tuple[str, ...], int] = {}
    for rank, own in enumerate(facts):
        for gpu in map(tuple, own["gpus"]):
            if gpu in seen:
                return f"workers {seen[gpu]} and {rank} share a GPU, which NCCL refuses"
            seen[gpu] = rank
    return None
