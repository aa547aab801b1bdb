"""Rendezvous: the rank of a worker, and the address where all workers connect.

Ranks are assigned as in TensorFlow. The task of job ``chief`` has rank 0, and the tasks of job
``worker`` follow in the order of their indices; without a chief, worker 0 has rank 0. All workers
connect to rank 0, and it writes files. A task of job ``evaluator`` is a cluster by itself. Tasks
of job ``ps`` and of unknown jobs have no rank. If a job has gaps in its indices, no rank is
assigned: a sparse spec may leave out tasks, and with a wrong number of workers the rendezvous
would never end.

``ClusterSpec`` has the tasks of a cluster by job, and their addresses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mirror.errors import ClusterError, ClusterTypeError, short_repr
from mirror.values import is_int

MAX_TASKS = 2**20
"""The limit of task indices; a larger one is a mistake, and would make a list of that length."""

_INDEX = re.compile("[0-9]{1,20}")


class ClusterSpec:
    """The tasks (processes) of a cluster, grouped in jobs, as ``tf.train.ClusterSpec``.

    ::

        ClusterSpec({"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]})
        ClusterSpec({"worker": {1: "b:2222"}})        # sparse: the other tasks are unknown

    Two specs are equal if their jobs have the same addresses under the same indices. A spec also
    equals a dict from jobs to dicts from index to address. A spec is immutable, and an empty one
    is false.

    Args:
        cluster: maps names of jobs to lists of addresses, or to dicts from index to address.

    Raises:
        ClusterError: an index is not a number, exceeds ``MAX_TASKS``, or occurs twice.
        ClusterTypeError: an argument has another type; this is a TypeError as well.
    """

    def __init__(
        self, cluster: ClusterSpec | Mapping[str, Sequence[str] | Mapping[int, str]]
    ) -> None:
        self._jobs: dict[str, dict[int, str]]
        if isinstance(cluster, ClusterSpec):
            self._jobs = {job: dict(tasks) for job, tasks in cluster._jobs.items()}
        elif isinstance(cluster, Mapping):
            self._jobs = {_name(job): _tasks(job, tasks) for job, tasks in cluster.items()}
        else:
            raise ClusterTypeError(
                "a cluster is a dict from names of jobs to lists of addresses, or a ClusterSpec; "
                f"got {short_repr(cluster)}"
            )

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks of a job; raises ValueError for an unknown job."""
        return len(self._tasks_of(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the sorted indices of a job's tasks; raises ValueError for an unknown job."""
        return sorted(self._tasks_of(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of a task; raises ValueError for an unknown job or index."""
        tasks = self._tasks_of(job_name)
        if not is_int(task_index) or task_index not in tasks:
            raise ClusterError(
                f"job {job_name!r} has no task {short_repr(task_index)}; "
                f"it has {_index_text(tasks)}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a job by index, and None where there is no task."""
        tasks = self._tasks_of(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns the tasks by job: a list of addresses, or a dict for an empty or sparse job."""
        return {job: _as_list(tasks) if tasks else {} for job, tasks in self._jobs.items()}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        return self._jobs == other if isinstance(other, Mapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        jobs = self.as_dict()
        return (
            "ClusterSpec({" + ", ".join(f"{job!r}: {jobs[job]!r}" for job in sorted(jobs)) + "})"
        )

    def _tasks_of(self, job: str) -> dict[int, str]:
        if not isinstance(job, str) or job not in self._jobs:
            known = ", ".join(map(repr, self._jobs)) or "no job at all"
            raise ClusterError(f"the cluster has no job {short_repr(job)}; it has {known}")
        return self._jobs[job]


def _name(job: object) -> str:
    if not isinstance(job, str):
        raise ClusterTypeError(f"a job's name is a string; got {short_repr(job)}")
    return job


def _tasks(job: str, tasks: object) -> dict[int, str]:
    items: Iterable[tuple[object, object]]
    if isinstance(tasks, (list, tuple)):
        items = enumerate(tasks)
    elif isinstance(tasks, Mapping):
        items = tasks.items()
    else:
        raise ClusterTypeError(
            f"the tasks of job {job!r} are a list of addresses, or a dict from index to address; "
            f"got {short_repr(tasks)}"
        )
    addresses: dict[int, str] = {}
    for key, address in items:
        index = _index(job, key)
        if not isinstance(address, str):
            raise ClusterTypeError(
                f"the address of task {index} of job {job!r} is a string, 'host:port'; got "
                f"{short_repr(address)}"
            )
        if index in addresses:
            raise ClusterError(f"job {job!r} has task {index} twice")
        addresses[index] = address
    return addresses


def _index(job: str, key: object) -> int:
    if isinstance(key, str) and _INDEX.fullmatch(key):
        key = int(key)  # keys of JSON objects are strings
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise ClusterTypeError(
            f"the tasks of job {job!r} are known by integers; got {short_repr(key)}"
        )
    if isinstance(key, str) or not 0 <= key < MAX_TASKS:
        raise ClusterError(
            f"the tasks of job {job!r} are known by integers from 0 to {MAX_TASKS - 1}; got "
            f"{short_repr(key)}"
        )
    return key


def _as_list(tasks: dict[int, str]) -> list[str] | dict[int, str]:
    in_order = {index: tasks[index] for index in sorted(tasks)}
    return list(in_order.values()) if max(tasks) + 1 == len(tasks) else in_order


def _index_text(tasks: dict[int, str]) -> str:
    indices = sorted(tasks)
    if not indices:
        return "none"
    if len(indices) > 1 and indices[-1] - indices[0] + 1 == len(indices):
        return f"{indices[0]} to {indices[-1]}"
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return ", ".join(map(str, indices[:8])) + more


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
        name = self.find_first(*names)
        return None if name is None else self.environ[name].strip()

    def find_first(self, *names: str) -> str | None:
        """Returns the name of the first variable that is set, or None."""
        return next((name for name in names if self.environ.get(name, "").strip()), None)

    def require_text(self, *names: str, why: str) -> str:
        """Returns the value of the first variable that is set.

        Raises:
            ClusterError: none is set; the message has the reason ``why`` one is needed.
        """
        text = self.text(*names)
        if text is None:
            raise unset_error(names, why)
        return text

    def integer(self, *names: str, least: int = 0, most: int = MAX_PROCESSES) -> int | None:
        """Returns the first variable that is set as a number, or None; checks the range."""
        name = self.find_first(*names)
        return None if name is None else integer(self.environ[name], name, least=least, most=most)

    def require_integer(
        self, *names: str, why: str, least: int = 0, most: int = MAX_PROCESSES
    ) -> int:
        """Returns the first variable that is set as a number; raises ClusterError if none is."""
        number = self.integer(*names, least=least, most=most)
        if number is None:
            raise unset_error(names, why)
        return number


def unset_error(names: tuple[str, ...], why: str) -> ClusterError:
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
