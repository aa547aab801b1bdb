"""Rendezvous: as whom, and where, a worker meets the others; and the rule who has which rank.

[Note: Ranks]
The ranks of the workers are TensorFlow's: the task of job ``chief``, where there is one, has rank
0, and the tasks of job ``worker`` follow in the order of their indices; without a chief worker 0
is it. Rank 0 is where all others meet, and who writes files. A task of job ``evaluator`` takes no
part: it is a cluster of its own. A task of job ``ps`` has no rank, nor has one of another name.
A job with gaps has no ranks: nobody can tell whether there are tasks that the spec leaves out, for
which is what a sparse one is made, and a wrong number of workers is a wait without an end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mirror.cluster.spec import ClusterSpec
from mirror.cluster.variables import MAX_PORT, MAX_PROCESSES, integer
from mirror.errors import ClusterError, short_repr

LOCALHOST = "127.0.0.1"
JOBS = ("chief", "worker", "evaluator", "ps")

_HOST = re.compile(r"[A-Za-z0-9_.%:-]+")


@dataclass(frozen=True)
class Rendezvous:
    """As whom, and where, this process meets the others: what torch.distributed wants to know.

    Attributes:
        rank: this process's, from 0.
        master_address: the host of rank 0, which all others can reach.
        master_port: rank 0's; 0 where there is one process: any free one.
        local_rank: this process's among those of its machine; ``None`` where nobody says.
    """

    rank: int
    world_size: int
    master_address: str
    master_port: int
    local_rank: int | None = None
    local_world_size: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_PROCESSES:
            raise ClusterError(
                f"there are 1 to {MAX_PROCESSES} workers; got a world size of {self.world_size}"
            )
        if not 0 <= self.rank < self.world_size:
            raise ClusterError(
                f"{self.world_size} workers have ranks 0 to {self.world_size - 1}; got {self.rank}"
            )
        local_size = self.world_size if self.local_world_size is None else self.local_world_size
        if not 1 <= local_size <= self.world_size:
            raise ClusterError(f"LOCAL_WORLD_SIZE={local_size}, but WORLD_SIZE={self.world_size}")
        if not 0 <= (self.local_rank or 0) < local_size:
            raise ClusterError(f"LOCAL_RANK={self.local_rank}, but LOCAL_WORLD_SIZE={local_size}")
        if not _HOST.fullmatch(self.master_address):
            raise ClusterError(
                f"the address of rank 0 is a host's name or number; got "
                f"{short_repr(self.master_address)}"
            )
        least = 0 if self.world_size == 1 else 1
        if not least <= self.master_port <= MAX_PORT:
            raise ClusterError(
                f"the port of rank 0 is {least} to {MAX_PORT}; got {self.master_port}"
            )

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.rank == 0

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that say the same to torch.distributed."""
        found = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in found.items() if value is not None}


def alone() -> Rendezvous:
    """Returns that of a process which has no others to meet."""
    return Rendezvous(0, 1, LOCALHOST, 0, 0, 1)


def rendezvous_of(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> Rendezvous:
    """Returns that of a task. See [Note: Ranks].

    Raises:
        ClusterError: the cluster or the task is none whose workers have ranks.
    """
    if not spec:
        return alone()
    workers = _workers(spec)
    if not workers:
        raise ClusterError("the cluster has neither a chief nor workers")
    if task_type is None or task_id is None:
        raise ClusterError(
            f"the cluster has {len(workers)} workers, and nobody says which of them this process "
            "is; give task_type and task_id"
        )
    if task_type != "evaluator" or "evaluator" in spec.jobs:  # which may be left out
        spec.task_address(task_type, task_id)  # there is such a task
    if task_type == "ps":
        raise ClusterError(
            "a task of job 'ps' is a parameter server, which is no worker and has no rank"
        )
    if task_type == "evaluator":
        return alone()
    tasks = [task for task, _ in workers]
    rank = tasks.index((task_type, task_id))
    hosts = [split_address(address)[0] if address else None for _, address in workers]
    first = split_address(workers[0][1])
    if first[1] is None and len(workers) > 1:
        job, index = tasks[0]
        raise ClusterError(
            f"task {index} of job {job!r} has rank 0, where all others meet: its address is "
            f"'host:port'; got {short_repr(workers[0][1])}"
        )
    here = hosts[rank]
    return Rendezvous(
        rank,
        len(workers),
        first[0],
        first[1] or 0,
        None if here is None else hosts[:rank].count(here),
        None if here is None else hosts.count(here),
    )


def split_address(address: str) -> tuple[str, int | None]:
    """Returns host and port of ``"host:port"``, ``"[::1]:port"``, or of a host alone.

    Raises:
        ClusterError: it is none of these.
    """
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]*))(?::(\S*))?", address)
    host = "" if match is None else match[1] or match[2]
    if match is None or not _HOST.fullmatch(host):
        raise ClusterError(
            f"an address is 'host:port', or '[number]:port' for IPv6; got {short_repr(address)}"
        )
    if match[3] is None:
        return host, None
    return host, integer(match[3], f"the port of {short_repr(address)}", most=MAX_PORT)


def _workers(spec: ClusterSpec) -> list[tuple[tuple[str, int], str]]:
    """All that have a rank, as ((job, index), address), in the order of their ranks."""
    unknown = [job for job in spec.jobs if job not in JOBS]
    if unknown:
        hint = "; call it 'chief'" if unknown == ["master"] else ""
        raise ClusterError(
            f"the jobs of workers that train together are {', '.join(JOBS)}; got "
            f"{', '.join(map(repr, unknown))}{hint}"
        )
    for job in ("chief", "evaluator"):
        if job in spec.jobs and spec.num_tasks(job) > 1:
            raise ClusterError(f"there is one {job}; got {spec.num_tasks(job)}")
    workers = []
    for job in ("chief", "worker"):
        indices = spec.task_indices(job) if job in spec.jobs else []
        if indices != list(range(len(indices))):
            raise ClusterError(
                f"the tasks of job {job!r} are numbered from 0 without gaps where they train "
                f"together; got {short_repr(indices)}; name all of them"
            )
        workers += [((job, index), spec.task_address(job, index)) for index in indices]
    return workers
