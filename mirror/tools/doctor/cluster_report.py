"""What the doctor finds of the cluster that this process is in, by its launcher's variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from dataclasses import asdict, dataclass

from mirror.cluster.launchers import launchers, resolver_of
from mirror.cluster.rendezvous import EnvironmentVariables, Rendezvous
from mirror.cluster.spec import ClusterSpec
from mirror.errors import ClusterError


@dataclass(frozen=True)
class ClusterReport:
    """What is known of the cluster.

    Attributes:
        launchers: those whose variables are set, the one that counts first; none: one process.
        place: as whom, and where, this process meets the others; ``None`` where that is not said.
        tasks: how many tasks each job has.
        failure: what is wrong with the variables; ``None`` if nothing is.
        warnings: what may be wrong.
    """

    launchers: tuple[str, ...]
    place: Rendezvous | None = None
    tasks: tuple[tuple[str, int], ...] = ()
    failure: str | None = None
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Returns everything as JSON can hold it."""
        return {**asdict(self), "tasks": dict(self.tasks)}

    def render(self) -> Iterator[str]:
        """Yields everything for a terminal."""
        if not self.launchers:
            yield "one process: no variables of torchrun, TF_CONFIG, Slurm or Kubernetes are set"
            return
        first, *others = self.launchers
        if self.failure is not None:
            yield f"{first}: WRONG: {self.failure}"
        elif self.place is not None:
            jobs = ", ".join(f"{count} {job}" for job, count in self.tasks)
            yield f"{first}: {_who(self.place)}{f'; tasks: {jobs}' if jobs else ''}"
        yield from self.warnings
        if others:
            yield f"the variables of {' and '.join(others)} are set, too; those of {first} count"


ONE_PROCESS = ClusterReport(())


def examine_cluster(environ: MutableMapping[str, str] | None = None) -> ClusterReport:
    """Returns what the variables of launchers say, which are left as they are.

    Args:
        environ: read instead of this process's environment.
    """
    environ = os.environ if environ is None else environ
    found = tuple(launchers(environ))
    if not found:
        return ONE_PROCESS
    try:
        resolver = resolver_of(found[0], environ)
        place, spec = resolver.rendezvous(), resolver.cluster_spec()
    except ClusterError as error:
        return ClusterReport(found, failure=str(error))
    warnings = tuple(_warnings(found[0], place, spec, EnvironmentVariables(environ)))
    tasks = tuple((job, spec.num_tasks(job)) for job in spec.jobs)
    return ClusterReport(found, place, tasks, warnings=warnings)


def _who(place: Rendezvous) -> str:
    if place.world_size == 1:
        return "this process is alone"
    where = f"all meet at {place.master_address}:{place.master_port}"
    if place.local_rank is not None and place.local_world_size is not None:
        where += f"; local rank {place.local_rank} of {place.local_world_size}"
    chief = ", the chief" if place.is_chief else ""
    return f"rank {place.rank} of {place.world_size}{chief}; {where}"


def _warnings(
    launcher: str, place: Rendezvous, spec: ClusterSpec, told: EnvironmentVariables
) -> Iterator[str]:
    is_step = told.first("SLURM_STEP_ID", "SLURM_STEPID") is not None
    if launcher == "Slurm" and not is_step and place.world_size > 1:
        yield (
            "SLURM_STEP_ID is not set: this may be the batch script itself, which runs once; "
            f"start the {place.world_size} workers with srun"
        )
    if launcher == "TF_CONFIG" and not spec:
        yield "TF_CONFIG has no cluster"
