"""SlurmResolver: the cluster of a process that srun started, from the step's tasks and nodes.

Slurm's lists of hosts and of tasks per node are expanded to one entry per node::

    n[1-3,7],m5           n1 n2 n3 n7 m5
    n[08-10]              n08 n09 n10           padded to the width of the first
    rack[0-1]n[1-2]-ib    rack0n1-ib rack0n2-ib rack1n1-ib rack1n2-ib
    2(x3),1               2 2 2 1
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import ClassVar

from mirror.cluster.rendezvous import MAX_PORT, ClusterSpec, EnvironmentVariables, integer
from mirror.cluster.resolver import ClusterResolver
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

    def _read_task_type(self) -> str | None:
        return self._task_of_process()[0]

    def _read_task_id(self) -> int | None:
        return self._task_of_process()[1]

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns ``task_type`` and ``task_id``."""
        return self.task_type, self.task_id

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Returns the number of GPUs of a task; it is the same for all tasks."""
        return {"GPU": self._gpus_per_task}

    def _task_of_process(self) -> tuple[str, int]:
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


_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_WHY = "srun sets it: start every worker with srun"

# The range of ports for rank 0. With the ports of the other tasks of its node, it stays below
# 32768, where Linux's range of automatically assigned ports begins.
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000
DEFAULT_PORT = 8888
_STRIDE = 7919  # a prime, so that the steps of a job get different ports


@dataclass(frozen=True)
class SlurmStep:
    """The tasks of one ``srun``.

    Attributes:
        rank: the task of this process.
        nodes: the names of the nodes, in Slurm's order: task 0 is on the first.
        counts: the number of tasks on each node.
        placement: for each task, by rank, the index of its node and its local rank there.
    """

    rank: int
    nodes: tuple[str, ...]
    counts: tuple[int, ...]
    placement: tuple[tuple[int, int], ...]

    @property
    def local_rank(self) -> int:
        """The local rank of this process."""
        return self.placement[self.rank][1]

    @property
    def num_tasks(self) -> int:
        """The number of tasks of the step."""
        return len(self.placement)


def read_step(
    env: EnvironmentVariables, tasks_per_node: int | Mapping[str, int] | None
) -> SlurmStep:
    """Returns the step that the variables describe.

    Args:
        tasks_per_node: replaces Slurm's value, for each node or for all nodes.

    Raises:
        ClusterError: variables are missing, damaged, or contradict each other.
    """
    rank = env.require_integer("SLURM_PROCID", why=_WHY)
    if isinstance(tasks_per_node, Mapping):
        nodes, counts = list(tasks_per_node), list(tasks_per_node.values())
    else:
        nodes = expand_hostlist(env.require_text(*_NODES, why=_WHY))
        counts = _counts(env, len(nodes), tasks_per_node)
    wrong = [count for count in counts if not isinstance(count, int) or count < 1]
    if wrong or not counts:
        raise ClusterError(
            "every node of a step has at least one task; got tasks_per_node="
            f"{short_repr(tasks_per_node)}"
        )
    if len(set(nodes)) < len(nodes):
        raise ClusterError(f"{env.find_first(*_NODES)} names a node twice: {short_repr(nodes)}")
    if len(nodes) != len(counts):
        raise ClusterError(
            f"{env.find_first(*_NODES)} has {len(nodes)} nodes, but "
            f"{env.find_first(*_PER_NODE)} has {len(counts)}"
        )
    placement = _place_tasks(counts, _chunk(env))
    step = SlurmStep(rank, tuple(nodes), tuple(counts), tuple(placement))
    if rank >= step.num_tasks:
        raise ClusterError(f"SLURM_PROCID={rank}, but there are {step.num_tasks} tasks, from 0")
    _compare(env, step)
    return step


def num_tasks(env: EnvironmentVariables) -> int | None:
    """Returns the number of tasks of the step, or None if Slurm does not provide it."""
    return env.integer(*_NUM_TASKS, least=1)


def port_of(env: EnvironmentVariables) -> int:
    """Returns a port for this step, computed from its ids; other steps rarely have the same.

    Without a job id, the result is TensorFlow's port for Slurm.
    """
    job = env.integer("SLURM_JOB_ID", "SLURM_JOBID", most=2**32)
    step = env.integer("SLURM_STEP_ID", "SLURM_STEPID", most=2**32) or 0
    return DEFAULT_PORT if job is None else _FIRST_PORT + (job + _STRIDE * step) % _NUM_PORTS


def _counts(env: EnvironmentVariables, num_nodes: int, tasks_per_node: int | None) -> list[int]:
    if tasks_per_node is not None:
        return [tasks_per_node] * num_nodes
    text = env.text(*_PER_NODE)
    if text is not None:
        return expand_tasks_per_node(text)
    total = num_tasks(env)
    if total is None or total % num_nodes:
        raise ClusterError(
            f"{_PER_NODE[0]} is not set, and {total} tasks cannot be divided equally among "
            f"{num_nodes} nodes; {_WHY}, or pass tasks_per_node"
        )
    return [total // num_nodes] * num_nodes


def _chunk(env: EnvironmentVariables) -> int | None:
    """Returns how many consecutive tasks go to one node; None means all tasks of the node."""
    name, _, size = (env.text("SLURM_DISTRIBUTION") or "").lower().partition("=")
    if name == "arbitrary":
        raise ClusterError(
            "SLURM_DISTRIBUTION=arbitrary takes nodes from a file, and no variable names it; "
            "start the workers with srun --distribution=block"
        )
    if name.startswith("cyclic"):
        return 1
    if name == "plane":
        planes = EnvironmentVariables({"SLURM_DISTRIBUTION": size} if size else env.environ)
        return planes.integer("SLURM_DISTRIBUTION" if size else "SLURM_DIST_PLANESIZE", least=1)
    return None


def _place_tasks(counts: Sequence[int], chunk: int | None) -> list[tuple[int, int]]:
    """Assigns tasks to the nodes in turn, ``chunk`` at a time, until each node is full."""
    chunk = chunk or max(counts, default=1)
    placement = []
    for begin in range(0, max(counts, default=0), chunk):
        for node, count in enumerate(counts):
            placement += [(node, local) for local in range(begin, min(begin + chunk, count))]
    return placement


def _compare(env: EnvironmentVariables, step: SlurmStep) -> None:
    """Raises ClusterError if Slurm's node or local rank of this process is different."""
    node, local = step.placement[step.rank]
    distribution = env.text("SLURM_DISTRIBUTION") or "block"
    for name, expected in (("SLURM_NODEID", node), ("SLURM_LOCALID", local)):
        value = env.integer(name)
        if value is not None and value != expected:
            raise ClusterError(
                f"{name}={value}, but by {env.find_first(*_PER_NODE) or 'the number of tasks'} "
                f"and SLURM_DISTRIBUTION={distribution} task {step.rank} has {expected}; start "
                "the workers with srun --distribution=block"
            )


MAX_HOSTS = 2**16
"""More than any cluster has. A longer range is a mistake, and would fill the memory."""

_HOST = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9,-]*\])+")
_PIECE = re.compile(r"\[([0-9,-]*)\]|([^\[\]]+)")
_RANGE = re.compile("([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TASKS = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Returns the hosts of a list in its order, with repetitions; ``""`` has none.

    Raises:
        ClusterError: the text is not such a list, or has more than ``MAX_HOSTS`` hosts.
    """
    hosts: list[str] = []
    for part in _parts(hostlist) if hostlist else ():
        if not _HOST.fullmatch(part):
            raise _hostlist_error(hostlist, f"{short_repr(part)} is not a host")
        choices = [
            [literal] if literal else _numbers(hostlist, ranges)
            for ranges, literal in _PIECE.findall(part)
        ]
        if len(hosts) + prod(map(len, choices)) > MAX_HOSTS:
            raise _hostlist_error(hostlist, f"it is of more than {MAX_HOSTS} hosts")
        hosts += map("".join, product(*choices))
    return hosts


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Returns the number of tasks on each node of a list, in its order.

    Raises:
        ClusterError: the text is not such a list, or has more than ``MAX_HOSTS`` nodes.
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _TASKS.fullmatch(part)
        count, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if not (count > 0 and 0 < times <= MAX_HOSTS - len(counts)):
            raise ClusterError(
                f"numbers of tasks per node are written like '2(x3),1'; got "
                f"{short_repr(tasks_per_node)}, where {short_repr(part)} is wrong"
            )
        counts += [count] * times
    return counts


def _parts(hostlist: str) -> Iterator[str]:
    """Yields the texts between commas that are not inside brackets."""
    begin = depth = 0
    for i, character in enumerate(hostlist):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _hostlist_error(hostlist, "its brackets do not pair up")
        if character == "," and depth == 0:
            yield hostlist[begin:i]
            begin = i + 1
    if depth:
        raise _hostlist_error(hostlist, "its brackets do not pair up")
    yield hostlist[begin:]


def _numbers(hostlist: str, ranges: str) -> list[str]:
    """Returns the numbers of the ranges in brackets, as texts, with their leading zeros."""
    texts = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 0 <= last - first < MAX_HOSTS:
            raise _hostlist_error(hostlist, f"{short_repr(part)} is not a range of numbers")
        width = len(match[1]) if match else 0
        texts.append([str(number).zfill(width) for number in range(first, last + 1)])
    return list(chain.from_iterable(texts))


def _hostlist_error(hostlist: str, reason: str) -> ClusterError:
    return ClusterError(
        f"a list of hosts is written like 'n[01-03,7],m5'; got {short_repr(hostlist)}: {reason}"
    )
