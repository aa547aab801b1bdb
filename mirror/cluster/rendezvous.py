"""Rendezvous: the rank of a worker, and the address where all workers connect.

Ranks are assigned as in TensorFlow. The task of job ``chief`` has rank 0, and the tasks of job
``worker`` follow in the order of their indices; without a chief, worker 0 has rank 0. All workers
connect to rank 0, and it writes files. A task of job ``evaluator`` is a cluster by itself. Tasks
of job ``ps`` and of unknown jobs have no rank. If a job has gaps in its indices, no rank is
assigned: a sparse spec may leave out tasks, and with a wrong number of workers the rendezvous
would never end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mirror.cluster.spec import ClusterSpec
from mirror.errors import ClusterError, short_repr

MAX_PROCESSES = 2**20
MAX_PORT = 65535

_NUMBER = re.compile("[0-9]{1,20}")


class EnvironmentVariables:
    """Reads environment variables; errors have the names of the variables.

    An empty variable counts as not set, since shells and manifests create empty ones.

    Args:
        environ: read in place of this process's environment.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = environ

    @property
    def environ(self) -> Mapping[str, str]:
        """The current variables."""
        return os.environ if self._environ is None else self._environ

    def text(self, *names: str) -> str | None:
        """Returns the value of the first variable that is set, or None."""
        name = self.first(*names)
        return None if name is None else self.environ[name].strip()

    def first(self, *names: str) -> str | None:
        """Returns the name of the first variable that is set, or None."""
        return next((name for name in names if self.environ.get(name, "").strip()), None)

    def needed(self, *names: str, why: str) -> str:
        """Returns the value of the first variable that is set.

        Raises:
            ClusterError: none is set; the message has the reason ``why`` one is needed.
        """
        text = self.text(*names)
        if text is None:
            raise missing(names, why)
        return text

    def integer(self, *names: str, least: int = 0, most: int = MAX_PROCESSES) -> int | None:
        """Returns the first variable that is set as a number, or None; checks the range."""
        name = self.first(*names)
        return None if name is None else integer(self.environ[name], name, least=least, most=most)

    def needed_integer(
        self, *names: str, why: str, least: int = 0, most: int = MAX_PROCESSES
    ) -> int:
        """Returns the first variable that is set as a number; raises ClusterError if none is."""
        number = self.integer(*names, least=least, most=most)
        if number is None:
            raise missing(names, why)
        return number


def missing(names: tuple[str, ...], why: str) -> ClusterError:
    """Returns the error that none of the variables is set."""
    return ClusterError(f"{' or '.join(names)} is not set; {why}")


def integer(text: str, name: str, *, least: int = 0, most: int = MAX_PROCESSES) -> int:
    """Returns a text as a number; raises ClusterError with ``name`` if it is not in the range."""
    digits = text.strip()
    number = int(digits) if _NUMBER.fullmatch(digits) else -1
    if not least <= number <= most:
        raise ClusterError(f"{name} is a number from {least} to {most}; got {short_repr(text)}")
    return number


LOCALHOST = "127.0.0.1"
JOBS = ("chief", "worker", "evaluator", "ps")

_HOST = re.compile(r"[A-Za-z0-9_.%:-]+")


@dataclass(frozen=True)
class Rendezvous:
    """The rank of this process and the address of rank 0, for torch.distributed.

    Attributes:
        rank: of this process, from 0.
        world_size: the number of workers.
        master_address: the host of rank 0, as the other workers reach it.
        master_port: the port of rank 0; 0 (any free port) if there is only one process.
        local_rank: the rank among the processes of this machine; None if unknown.
        local_world_size: the number of processes of this machine; None if unknown.
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
        """Whether this process writes files."""
        return self.rank == 0

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of torch.distributed for this rendezvous."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def single_process() -> Rendezvous:
    """Returns the rendezvous of a process without other workers."""
    return Rendezvous(0, 1, LOCALHOST, 0, 0, 1)


def rendezvous_of(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> Rendezvous:
    """Returns the rendezvous of a task.

    Raises:
        ClusterError: the cluster's workers, or the task, have no rank.
    """
    if not spec:
        return single_process()
    workers = _ranked_tasks(spec)
    if not workers:
        raise ClusterError("the cluster has neither a chief nor workers")
    if task_type is None or task_id is None:
        raise ClusterError(
            f"the cluster has {len(workers)} workers, and this process's task is unknown; pass "
            "task_type and task_id"
        )
    if task_type != "evaluator" or "evaluator" in spec.jobs:  # specs may omit the evaluator
        spec.task_address(task_type, task_id)  # raises if there is no such task
    if task_type == "ps":
        raise ClusterError(
            "a task of job 'ps' is a parameter server, which is not a worker and has no rank"
        )
    if task_type == "evaluator":
        return single_process()
    tasks = [task for task, _ in workers]
    rank = tasks.index((task_type, task_id))
    hosts = [split_address(address)[0] if address else None for _, address in workers]
    first = split_address(workers[0][1])
    if first[1] is None and len(workers) > 1:
        job, index = tasks[0]
        raise ClusterError(
            f"task {index} of job {job!r} has rank 0, to which all workers connect: its address "
            f"is 'host:port'; got {short_repr(workers[0][1])}"
        )
    own = hosts[rank]
    return Rendezvous(
        rank,
        len(workers),
        first[0],
        first[1] or 0,
        None if own is None else hosts[:rank].count(own),
        None if own is None else hosts.count(own),
    )


def split_address(address: str) -> tuple[str, int | None]:
    """Returns host and port of ``"host:port"``, ``"[::1]:port"``, or of a host without a port.

    Raises:
        ClusterError: the address has another form.
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


def _ranked_tasks(spec: ClusterSpec) -> list[tuple[tuple[str, int], str]]:
    """Returns the tasks that have ranks, as ((job, index), address), in the order of ranks."""
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
                f"the tasks of job {job!r} must be numbered from 0 without gaps to train; "
                f"got {short_repr(indices)}; name all of them"
            )
        workers += [((job, index), spec.task_address(job, index)) for index in indices]
    return workers
