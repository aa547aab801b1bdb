"""MultiWorkerMirroredStrategy: the devices of several processes train one model, as one would."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mirror.base.migration_hints import call_with_hints
from mirror.comm.communicator import Communicator
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.devices import resolve
from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.step_report import Report
from mirror.strategy.strategy_options import (
    CommunicationOptions,
    GradientReduction,
    Guards,
    Schedule,
)
from mirror.threads.user_frames import line_of, user_line
from mirror.viewer.trace_file import Trace

if TYPE_CHECKING:
    from mirror.cluster.resolver import ClusterResolver


@call_with_hints
class MultiWorkerMirroredStrategy(MirroredStrategy):
    """Mirrors a model's variables on the devices of several processes, the *workers*.

    Every worker runs the same program::

        strategy = mirror.MultiWorkerMirroredStrategy()   # started by torchrun, on each machine

    ``num_replicas_in_sync`` and ``replica_id_in_sync_group`` count the replicas of all workers,
    ``devices`` are this worker's. Outside ``run`` a worker is to the others what a replica is to
    the others inside: its loss counts with its examples. Worker 0 is the chief, whose initial
    values all get, and who writes files.

    Args:
        devices, backend, communication_options, guards, gradient_reduction, schedule: of this
            worker, see ``MirroredStrategy``; workers may have unlike numbers of devices.
        cluster_resolver: says who and where the workers are; ``None``: the one for the launcher
            that has started this process (torchrun, TF_CONFIG, Slurm, Kubernetes).

    Raises:
        ClusterError: what was found of the cluster is wrong, or contradictory.
        WorkerLostError: a worker has not come, or is gone.
        As ``MirroredStrategy``.
    """

    def __init__(
        self,
        devices: Sequence[torch.device | str | int] | None = None,
        backend: str | Communicator = "auto",
        *,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        guards: Guards | None = None,
        gradient_reduction: GradientReduction = "mean",
        schedule: Schedule = "auto",
    ) -> None:
        self._resolver = cluster_resolver
        super().__init__(
            devices,
            backend,
            communication_options=communication_options,
            guards=guards,
            gradient_reduction=gradient_reduction,
            schedule=schedule,
        )

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What says who the workers are; ``None`` where nobody does, and this is the only one."""
        return self._resolver

    def report(self) -> Report:
        """Returns where the time of this worker's last steps went; printed, a table."""
        workers = self._group.replicas.workers
        whose = f"worker {workers.rank} of {workers.size}" if workers.is_multi_process else None
        return replace(super().report(), worker=whose)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[Trace]:
        """Writes what happens inside, each worker its own: ``name.worker1.json``.

        Raises:
            As ``MirroredStrategy.trace``.
        """
        workers, whole = self._group.replicas.workers, Path(path)
        if workers.is_multi_process:
            path = whole.with_name(f"{whole.stem}.worker{workers.rank}{whole.suffix}")
        with super().trace(path) as trace:
            yield trace

    def _rows(self, devices: Any) -> Sequence[Sequence[torch.device]]:
        return [(device,) for device in resolve(devices)]

    def _meet(
        self,
        devices: Sequence[torch.device],
        backend: str | Communicator,
        options: CommunicationOptions,
    ) -> LocalWorkerGroup | None:
        # All take their time to import, and most programs do without.
        from mirror.cluster.launchers import launchers, resolver_of
        from mirror.comm.workers.distributed_group import DEFAULT_SECONDS, DistributedWorkerGroup
        from mirror.comm.workers.nccl_all_reduce import negotiate_nccl

        if self._resolver is None:
            found = launchers()
            self._resolver = resolver_of(found[0]) if found else None
        size = 1 if self._resolver is None else self._resolver.apply().world_size
        if size == 1 and not torch.distributed.is_initialized():
            return None

        def where() -> str:
            return user_line(sys._getframe(1))

        seconds = options.timeout_seconds
        workers = DistributedWorkerGroup(len(devices), where, seconds, line_of)
        if backend in ("auto", "nccl"):
            sums = negotiate_nccl(
                workers, devices, DEFAULT_SECONDS if seconds is None else seconds
            )
            if sums is not None:
                workers.sum_replicas_by(sums)
        return workers
