"""The settings of servers and workers, and their addresses in a cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mirror.errors import ClusterError, StrategyError, short_repr

if TYPE_CHECKING:
    from mirror.cluster.rendezvous import ClusterSpec


JOBS = ("chief", "worker", "ps")
SERVING = {"ps": "server", "worker": "worker"}
"""The jobs that serve the chief's program, and the names of their actors."""

_MAX_PORT = 65535
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:/\s]+):([0-9]{1,5})")


@dataclass(frozen=True)
class Settings:
    """The arguments of a ``ParameterServerStrategy``; see there."""

    num_servers: int
    num_workers: int
    engine: Any = "auto"
    to_aggregate: int | None = None
    max_staleness: int | None = None
    partitioner: Any = None
    placement: Any = "round_robin"
    timeout_seconds: float = 600.0

    @property
    def is_sync(self) -> bool:
        return self.to_aggregate is not None


@dataclass(frozen=True)
class Tasks:
    """The addresses of servers and workers in a cluster."""

    servers: tuple[str, ...]
    workers: tuple[str, ...]

    def addresses_by_name(self) -> dict[str, tuple[str, int]]:
        """Returns host and port by the actor's name, such as ``server 0``."""
        return {
            f"{name} {i}": host_and_port(address)
            for name, own in (("server", self.servers), ("worker", self.workers))
            for i, address in enumerate(own)
        }


def tasks_of(cluster: Any) -> Tasks:
    """Returns the tasks of a ClusterSpec, a dict, or a resolver.

    Raises:
        ValueError: a job has another name, there are several chiefs, no ps or no worker, or an
            address is invalid or occurs twice.
        StrategyError: the resolver says that this process is a server or a worker.
    """
    spec = spec_of(cluster)
    counts = {job: spec.num_tasks(job) if job in spec.jobs else 0 for job in JOBS}
    if counts["chief"] > 1:
        raise ValueError(f"a cluster has at most one chief; got {counts['chief']}")
    for job in SERVING:
        if counts[job] < 1:
            raise ValueError(f"a cluster of parameter servers has at least one {job}; got none")
    of_jobs = {job: [spec.task_address(job, i) for i in spec.task_indices(job)] for job in SERVING}
    known: set[str] = set()
    for address in (*of_jobs["ps"], *of_jobs["worker"]):
        host_and_port(address)
        if address in known:
            raise ClusterError(
                f"every task has an address of its own; got {short_repr(address)} more than once"
            )
        known.add(address)
    if getattr(cluster, "task_type", None) in SERVING:
        raise StrategyError(
            f"this process is task {cluster.task_id} of job {cluster.task_type!r}, which serves "
            "the chief's program and has no strategy of its own; call "
            "mirror.server.Server(resolver).join() here"
        )
    return Tasks(tuple(of_jobs["ps"]), tuple(of_jobs["worker"]))


def spec_of(cluster: Any) -> ClusterSpec:
    """Returns a cluster's spec; raises ValueError if a job has another name."""
    from mirror.cluster.rendezvous import ClusterSpec  # imported only by programs with a cluster

    spec = ClusterSpec(cluster.cluster_spec() if hasattr(cluster, "cluster_spec") else cluster)
    unknown = [job for job in spec.jobs if job not in JOBS]
    if unknown:
        raise ValueError(
            f"a cluster of parameter servers has the jobs {', '.join(map(repr, JOBS))}; got "
            f"{unknown[0]!r}"
        )
    return spec


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the two parts of an address; raises ClusterError if it is invalid."""
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or int(found[2]) > _MAX_PORT:
        raise ClusterError(
            f"an address is 'host:port', with a port up to {_MAX_PORT}; got {short_repr(address)}"
        )
    return found[1].strip("[]"), int(found[2])
