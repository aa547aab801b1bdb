"""SlurmResolver: the cluster of a process that srun started."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import ClassVar

from mirror.cluster.rendezvous import MAX_PORT, EnvironmentVariables, integer
from mirror.cluster.resolver import ClusterResolver
from mirror.cluster.slurm_step import num_tasks, port_of, read_step
from mirror.cluster.spec import ClusterSpec
from mirror.devices import count_cuda_devices
from mirror.errors import ClusterError, short_repr

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class SlurmResolver(ClusterResolver):
    """Reads the variables of srun, as ``tf.distribute.cluster_resolver.SlurmClusterResolver``.

    The constructor reads SLURM_PROCID, SLURM_STEP_NODELIST or SLURM_JOB_NODELIST,
    SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_STEP_TASKS_PER_NODE and SLURM_DISTRIBUTION. Nodes
    keep Slurm's order, since task 0 is on the first node (TensorFlow sorts their names).

    Args:
        jobs: the number of tasks of each job; jobs get Slurm's tasks in the order of their names.
            With None, all tasks belong to job ``worker``.
        port_base: the port of the first task of each node; the next tasks have the next ports.
            With None, the port is computed from the ids of job and step; without a job id it is
            8888, as in TensorFlow.
        gpus_per_node: with None, the number of GPUs that this process sees.
        gpus_per_task: with None, the GPUs of a node are divided equally among its tasks; if Slurm
            has divided them already, it is the number that this process sees.
        tasks_per_node: one number, or one for each node; with None, Slurm's.
        auto_set_gpu: whether ``cluster_spec()`` sets CUDA_VISIBLE_DEVICES to this task's share, as
            in TensorFlow; call it before CUDA is first used.
        environ: used in place of this process's environment.

    Raises:
        ClusterError: variables are missing or damaged, or contradict each other or the arguments.
    """

    # The value of CUDA_VISIBLE_DEVICES that a resolver of this process has set.
    _assigned: ClassVar[str | None] = None

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int | None = None,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        environ: MutableMapping[str, str] | None = None,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        env = EnvironmentVariables(self._environ)
        self._step = read_step(env, tasks_per_node)
        self._jobs = _jobs(jobs, num_tasks(env), self._step.num_tasks)
        for name, gpus in (("node", gpus_per_node), ("task", gpus_per_task)):
            if gpus is not None and gpus < 0:
                raise ClusterError(f"gpus_per_{name} is a number of GPUs; got {short_repr(gpus)}")
        self._port_base = port_of(env) if port_base is None else port_base
        last = self._port_base + max(self._step.counts) - 1
        if not 0 < self._port_base <= last <= MAX_PORT:
            raise ClusterError(
                f"the tasks of a node have ports {self._port_base} to {last}; ports are 1 to "
                f"{MAX_PORT}; pass another port_base"
            )
        self._rpc_layer = rpc_layer
        self._set_gpus = auto_set_gpu
        self._gpus, self._gpus_per_task = self._assign_gpus(env, gpus_per_node, gpus_per_task)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of all jobs, and sets CUDA_VISIBLE_DEVICES; see ``auto_set_gpu``."""
        if self._set_gpus and self._gpus is not None:
            self._environ[_VISIBLE] = type(self)._assigned = self._gpus
        nodes = self._step.nodes
        tasks = [f"{nodes[node]}:{self._port_base + i}" for node, i in self._step.placement]
        return ClusterSpec({job: tasks[begin:end] for job, (begin, end) in self._jobs.items()})

    @property
    def task_type(self) -> str | None:
        """The job of this process, from SLURM_PROCID."""
        return self._own_task[0] if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job."""
        return self._own_task[1] if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns ``task_type`` and ``task_id``."""
        return self.task_type, self.task_id

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Returns the number of GPUs of a task; it is the same for all tasks."""
        return {"GPU": self._gpus_per_task}

    @property
    def _own_task(self) -> tuple[str, int]:
        rank = self._step.rank
        return next((j, rank - b) for j, (b, e) in self._jobs.items() if b <= rank < e)

    def _assign_gpus(
        self, env: EnvironmentVariables, gpus_per_node: int | None, gpus_per_task: int | None
    ) -> tuple[str | None, int]:
        """Returns the new CUDA_VISIBLE_DEVICES (None to keep it) and the GPUs per task."""
        text = self._environ.get(_VISIBLE)
        if text is None:
            visible = [str(i) for i in range(count_cuda_devices())]
        else:
            visible = [name.strip() for name in text.split(",") if name.strip()]
        most = max(self._step.counts)
        is_own = text is not None and text == self._assigned
        if gpus_per_node is None and gpus_per_task is None:
            gpus_per_task = _gpus_per_task(env)
            on_node = env.integer("SLURM_GPUS_ON_NODE") or 0
            if is_own or len(visible) < max(most, on_node, (gpus_per_task or 0) + 1):
                return None, len(visible)
        gpus_per_node = len(visible) if gpus_per_node is None else gpus_per_node
        gpus_per_task = gpus_per_node // most if gpus_per_task is None else gpus_per_task
        if gpus_per_task * most > gpus_per_node:
            raise ClusterError(
                f"{most} tasks on a node with {gpus_per_task} GPUs each are more than its "
                f"{gpus_per_node} GPUs; ask for fewer tasks per node, or pass gpus_per_task"
            )
        if gpus_per_task == 0 or (is_own and len(visible) == gpus_per_task):
            return None, gpus_per_task
        if len(visible) != gpus_per_node:
            visible = [str(i) for i in range(gpus_per_node)]
        begin = self._step.local_rank * gpus_per_task
        return ",".join(visible[begin : begin + gpus_per_task]), gpus_per_task


def _gpus_per_task(env: EnvironmentVariables) -> int | None:
    text = env.text("SLURM_GPUS_PER_TASK")  # "2" or "a100:2"
    return None if text is None else integer(text.rpartition(":")[2], "SLURM_GPUS_PER_TASK")


def _jobs(
    jobs: Mapping[str, int] | None, declared: int | None, placed: int
) -> dict[str, tuple[int, int]]:
    """Returns the first rank and the end of each job."""
    counts = {"worker": placed if declared is None else declared} if jobs is None else jobs
    wrong = [job for job, count in counts.items() if not isinstance(count, int) or count < 0]
    if wrong:
        raise ClusterError(f"jobs say how many tasks each job has; got {short_repr(dict(counts))}")
    if sum(counts.values()) != placed:
        raise ClusterError(
            f"{' + '.join(f'{count} {job}' for job, count in sorted(counts.items()))} are "
            f"{sum(counts.values())} tasks, but Slurm has {placed} on the nodes of this step"
        )
    ranges, begin = {}, 0
    for job, count in sorted(counts.items()):
        ranges[job] = begin, begin + count
        begin += count
    return ranges
