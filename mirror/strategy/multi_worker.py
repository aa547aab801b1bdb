"""MultiWorkerMirroredStrategy: the devices of several processes train one model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mirror.base.migration_hints import call_with_hints
from mirror.base.pictures import Trace
from mirror.comm.communicator import Communicator
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.devices import resolve
from mirror.errors import StrategyError
from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.step_report import Report
from mirror.strategy.strategy_options import (
    CommunicationOptions,
    GradientReduction,
    Guards,
    OptimizerState,
    Schedule,
    Verify,
)
from mirror.threads.user_frames import line_of, user_line

if TYPE_CHECKING:
    from mirror.cluster.resolver import ClusterResolver


@call_with_hints
class MultiWorkerMirroredStrategy(MirroredStrategy):
    """Mirrors a model's variables on the devices of several processes, the *workers*.

    Every worker runs the same program::

        strategy = mirror.MultiWorkerMirroredStrategy()   # started by torchrun, on each machine

    ``num_replicas_in_sync`` and ``replica_id_in_sync_group`` count the replicas of all workers;
    ``devices`` are this worker's. Outside ``run``, workers must agree just as replicas must inside
    ``run``, and each worker's loss is weighted by its examples. Worker 0 is the chief: all workers
    start from its initial values, and it writes files.

    Args:
        devices, backend, communication_options, guards, schedule: this worker's arguments of
            ``MirroredStrategy``; workers may differ in number of devices.
        gradient_reduction, optimizer_state: the same on all workers. ``"sharded"`` shards the
            state over the devices of all workers; all of them read it together.
        cluster_resolver: the source of the workers' ranks and addresses. ``None`` selects it by
            the launcher of this process (torchrun, TF_CONFIG, Slurm, Kubernetes).

    Raises:
        ClusterError: the description of the cluster is wrong or contradictory.
        WorkerLostError: a worker has not arrived, or is lost.
        StrategyError: workers differ in one of these.
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
        optimizer_state: OptimizerState = "replicated",
        verify: Verify = "first",
    ) -> None:
        self._resolver = cluster_resolver
        super().__init__(
            devices,
            backend,
            communication_options=communication_options,
            guards=guards,
            gradient_reduction=gradient_reduction,
            schedule=schedule,
            verify=verify,
            optimizer_state=optimizer_state,
        )
        try:
            self._refuse_different_options(
                gradient_reduction=gradient_reduction, optimizer_state=optimizer_state
            )
        except BaseException:
            self.close()
            raise

    def _refuse_different_options(self, **options: str) -> None:
        """Raises StrategyError on all workers if an option differs between them."""
        workers = self._group.replicas.workers
        if not workers.is_multi_process:
            return
        own = json.dumps(options).encode()
        of_workers = map(
            json.loads, workers.exchange("options of the strategy", None, lambda: own)
        )
        values: dict[str, list[str]] = {name: [] for name in options}
        for theirs in of_workers:
            for name, known in values.items():
                known.append(theirs[name])
        for name, known in values.items():
            if len(set(known)) > 1:
                listed = ", ".join(f"{value!r} on worker {r}" for r, value in enumerate(known))
                raise StrategyError(
                    f"{name} must be the same on all workers, and it is {listed}; pass the same "
                    "value on each"
                )

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The source of the workers' ranks and addresses; ``None`` for a single worker."""
        return self._resolver

    def report(self) -> Report:
        """Returns the times of the parts of this worker's last steps; it prints as a table."""
        workers = self._group.replicas.workers
        worker = f"worker {workers.rank} of {workers.size}" if workers.is_multi_process else None
        return replace(super().report(), worker=worker)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[Trace]:
        """Writes a trace of the block, one file for each worker: ``name.worker1.json``.

        Raises:
            As ``MirroredStrategy.trace``.
        """
        workers, whole = self._group.replicas.workers, Path(path)
        if workers.is_multi_process:
            path = whole.with_name(f"{whole.stem}.worker{workers.rank}{whole.suffix}")
        with super().trace(path) as trace:
            yield trace

    def _resolve_devices(self, devices: Any) -> Sequence[Sequence[torch.device]]:
        return [(device,) for device in resolve(devices)]

    def _join_workers(
        self,
        devices: Sequence[torch.device],
        backend: str | Communicator,
        options: CommunicationOptions,
    ) -> LocalWorkerGroup | None:
        # Imported here, since the imports are slow and most programs need none of them.
        from mirror.cluster.launchers import launchers, resolver_of
        from mirror.comm.workers.distributed_group import DEFAULT_SECONDS, DistributedWorkerGroup
        from mirror.comm.workers.nccl_all_reduce import negotiate_nccl

        if self._resolver is None:
            found = launchers()
            self._resolver = resolver_of(found[0]) if found else None
        size = 1 if self._resolver is None else self._resolver.apply().world_size
        if size == 1 and not torch.distributed.is_initialized():
            return None

        def find_user_line() -> str:
            return user_line(sys._getframe(1))

        seconds = options.timeout_seconds
        workers = DistributedWorkerGroup(len(devices), find_user_line, seconds, line_of)
        if backend in ("auto", "nccl"):
            sums = negotiate_nccl(
                workers, devices, DEFAULT_SECONDS if seconds is None else seconds
            )
            if sums is not None:
                workers.sum_replicas_by(sums)
        return workers
