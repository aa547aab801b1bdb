"""ClusterSpec: the tasks of a cluster by job, and their addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from mirror.errors import ClusterError, ClusterTypeError, short_repr

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
        if task_index not in tasks:
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
