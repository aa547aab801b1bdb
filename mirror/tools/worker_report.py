"""``mirror doctor`` on other workers: the cluster by launcher variables, and measured links."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter

import torch

from mirror.cluster.launchers import launchers, resolver_of
from mirror.cluster.rendezvous import ClusterSpec, EnvironmentVariables, Rendezvous
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.errors import ClusterError, DivergenceError, WorkerLostError


@dataclass(frozen=True)
class ClusterReport:
    """The cluster of this process.

    Attributes:
        launchers: the launchers with variables in the environment, the decisive one first.
        rendezvous: the rank of this process and the address of rank 0; ``None`` if unknown.
        tasks: the number of tasks of each job.
        failure: the error in the variables; ``None`` if there is none.
        warnings: possible problems.
    """

    launchers: tuple[str, ...]
    rendezvous: Rendezvous | None = None
    tasks: tuple[tuple[str, int], ...] = ()
    failure: str | None = None
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Returns the report as values for JSON."""
        place = None if self.rendezvous is None else asdict(self.rendezvous)
        values = {**asdict(self), "tasks": dict(self.tasks), "place": place}
        del values["rendezvous"]
        return values

    def render(self) -> Iterator[str]:
        """Yields the lines for a terminal."""
        if not self.launchers:
            yield "one process: no variables of torchrun, TF_CONFIG, Slurm or Kubernetes are set"
            return
        first, *others = self.launchers
        if self.failure is not None:
            yield f"{first}: WRONG: {self.failure}"
        elif self.rendezvous is not None:
            jobs = ", ".join(f"{count} {job}" for job, count in self.tasks)
            yield f"{first}: {_describe_rank(self.rendezvous)}{f'; tasks: {jobs}' if jobs else ''}"
        yield from self.warnings
        if others:
            yield f"the variables of {' and '.join(others)} are set, too; those of {first} count"


ONE_PROCESS = ClusterReport(())


def examine_cluster(environ: MutableMapping[str, str] | None = None) -> ClusterReport:
    """Returns the report from the variables of launchers; changes none of them.

    Args:
        environ: replaces this process's environment.
    """
    environ = os.environ if environ is None else environ
    found = tuple(launchers(environ))
    if not found:
        return ONE_PROCESS
    try:
        resolver = resolver_of(found[0], environ)
        rendezvous, spec = resolver.rendezvous(), resolver.cluster_spec()
    except ClusterError as error:
        return ClusterReport(found, failure=str(error))
    warnings = tuple(_warnings(found[0], rendezvous, spec, EnvironmentVariables(environ)))
    tasks = tuple((job, spec.num_tasks(job)) for job in spec.jobs)
    return ClusterReport(found, rendezvous, tasks, warnings=warnings)


def _describe_rank(place: Rendezvous) -> str:
    if place.world_size == 1:
        return "this process is alone"
    where = f"all meet at {place.master_address}:{place.master_port}"
    if place.local_rank is not None and place.local_world_size is not None:
        where += f"; local rank {place.local_rank} of {place.local_world_size}"
    chief = ", the chief" if place.is_chief else ""
    return f"rank {place.rank} of {place.world_size}{chief}; {where}"


def _warnings(
    launcher: str, place: Rendezvous, spec: ClusterSpec, env: EnvironmentVariables
) -> Iterator[str]:
    is_step = env.first("SLURM_STEP_ID", "SLURM_STEPID") is not None
    if launcher == "Slurm" and not is_step and place.world_size > 1:
        yield (
            "SLURM_STEP_ID is not set: this may be the batch script itself, which runs once; "
            f"start the {place.world_size} workers with srun"
        )
    if launcher == "TF_CONFIG" and not spec:
        yield "TF_CONFIG has no cluster"


_SECONDS = 30.0
_NUM_EXCHANGES, _NUM_SUMS = 50, 5
_SUM_BYTES = 10 * 10**6


@dataclass(frozen=True)
class LinkReport:
    """The measured links between workers.

    Attributes:
        seconds_per_exchange: the median time of an exchange of envelopes.
        seconds_per_sum: the best time of an all-reduce of ``sum_bytes``.
        missing: the reason why the other workers did not connect, as they need not run a doctor;
            ``None`` if they did.
        failure: the error; ``None`` if there is none.
    """

    seconds_per_exchange: float | None = None
    seconds_per_sum: float | None = None
    sum_bytes: int = _SUM_BYTES
    missing: str | None = None
    failure: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Returns the report as values for JSON."""
        return asdict(self)

    def render(self) -> Iterator[str]:
        """Yields the lines for a terminal."""
        if self.failure is not None:
            yield f"FAILED: {self.failure}"
        elif self.missing is not None:
            yield f"not tested: {self.missing}"
        elif self.seconds_per_exchange is not None and self.seconds_per_sum is not None:
            yield f"an exchange of all workers takes {self.seconds_per_exchange * 1e6:.0f} us"
            rate = self.sum_bytes / self.seconds_per_sum / 1e9
            yield (
                f"an all-reduce of {self.sum_bytes / 1e6:.0f} MB takes "
                f"{self.seconds_per_sum * 1e3:.1f} ms, {rate:.2f} GB/s"
            )


def measure_links(
    num_workers: int,
    tell: Callable[[str], None] | None = None,
    seconds: float | None = None,
) -> LinkReport:
    """Connects to the other workers, which also run ``mirror doctor``, and measures the links.

    torch.distributed reads the address from the environment.

    Args:
        tell: called with a line before it waits for the other workers.
        seconds: the timeout; ``None``: 30.
    """
    if not torch.distributed.is_available():
        return LinkReport(failure="this torch was built without torch.distributed")
    from mirror.comm.workers.distributed_group import DistributedWorkerGroup  # needs it

    seconds = _SECONDS if seconds is None else seconds
    if tell is not None:
        tell(f"waiting up to {seconds:g} s for the doctors of the other workers")
    try:
        workers = DistributedWorkerGroup(1, lambda: "mirror doctor", seconds)
    except WorkerLostError as error:
        return LinkReport(
            missing=f"{str(error).splitlines()[0]} (mirror doctor tests the links if all "
            f"{num_workers} workers run it at once)"
        )
    try:
        return _measure(workers)
    except (WorkerLostError, DivergenceError) as error:
        return LinkReport(failure=str(error))
    finally:
        workers.close()


def _measure(workers: LocalWorkerGroup) -> LinkReport:
    exchanges = [_time(lambda: workers.exchange("a test")) for _ in range(_NUM_EXCHANGES)]
    sums = []
    for _ in range(_NUM_SUMS):
        buffer = torch.ones(_SUM_BYTES // 4)
        workers.exchange("a test begins")
        sums.append(_time(partial(workers.all_reduce_sum_, "a test", buffer)))
        if not torch.equal(buffer, torch.full_like(buffer, workers.size)):
            return LinkReport(failure="the sum over the workers is wrong")
    return LinkReport(statistics.median(exchanges), min(sums))


def _time(call: Callable[[], object]) -> float:
    begun = perf_counter()
    call()
    return perf_counter() - begun
