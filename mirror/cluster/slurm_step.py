"""SlurmStep: which tasks a Slurm step has, and on which nodes they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mirror.cluster.hostlist import expand_hostlist, expand_tasks_per_node
from mirror.cluster.variables import EnvironmentVariables
from mirror.errors import ClusterError, short_repr

_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_WHY = "srun sets it: start every worker with srun"

# Ports from here on, so many that with those of the tasks of one node they stay below 32768, from
# where on Linux gives them to whoever asks for any.
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000
DEFAULT_PORT = 8888
_STRIDE = 7919  # a prime: steps of a job have ports of their own


@dataclass(frozen=True)
class SlurmStep:
    """The tasks of one ``srun``, and which of them this process is.

    Attributes:
        nodes: their names, in Slurm's order, in which task 0 is on the first.
        counts: how many tasks are on each.
        places: of each task, by its rank, its node's index and its number on that node.
    """

    rank: int
    nodes: tuple[str, ...]
    counts: tuple[int, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return self.places[self.rank][1]

    @property
    def num_tasks(self) -> int:
        """All of them."""
        return len(self.places)


def read_step(
    told: EnvironmentVariables, tasks_per_node: int | Mapping[str, int] | None
) -> SlurmStep:
    """Returns the step that the variables tell of.

    Args:
        tasks_per_node: what the program says of it, by node or for all of them, instead of Slurm.

    Raises:
        ClusterError: variables are missing, damaged, or contradict each other.
    """
    rank = told.needed_integer("SLURM_PROCID", why=_WHY)
    if isinstance(tasks_per_node, Mapping):
        nodes, counts = list(tasks_per_node), list(tasks_per_node.values())
    else:
        nodes = expand_hostlist(told.needed(*_NODES, why=_WHY))
        counts = _counts(told, len(nodes), tasks_per_node)
    wrong = [count for count in counts if not isinstance(count, int) or count < 1]
    if wrong or not counts:
        raise ClusterError(
            "every node of a step has at least one task; got tasks_per_node="
            f"{short_repr(tasks_per_node)}"
        )
    if len(set(nodes)) < len(nodes):
        raise ClusterError(f"{told.first(*_NODES)} names a node twice: {short_repr(nodes)}")
    if len(nodes) != len(counts):
        raise ClusterError(
            f"{told.first(*_NODES)} is of {len(nodes)} nodes, {told.first(*_PER_NODE)} of "
            f"{len(counts)}"
        )
    places = _placed(counts, _chunk(told))
    step = SlurmStep(rank, tuple(nodes), tuple(counts), tuple(places))
    if rank >= step.num_tasks:
        raise ClusterError(f"SLURM_PROCID={rank}, but there are {step.num_tasks} tasks, from 0")
    _compare(told, step)
    return step


def num_tasks(told: EnvironmentVariables) -> int | None:
    """Returns how many tasks Slurm says the step has."""
    return told.integer(*_NUM_TASKS, least=1)


def port_of(told: EnvironmentVariables) -> int:
    """Returns a port that all tasks of this step have, and few others: that of its ids.

    Without a job's id it is TensorFlow's for Slurm.
    """
    job = told.integer("SLURM_JOB_ID", "SLURM_JOBID", most=2**32)
    step = told.integer("SLURM_STEP_ID", "SLURM_STEPID", most=2**32) or 0
    return DEFAULT_PORT if job is None else _FIRST_PORT + (job + _STRIDE * step) % _NUM_PORTS


def _counts(told: EnvironmentVariables, num_nodes: int, tasks_per_node: int | None) -> list[int]:
    if tasks_per_node is not None:
        return [tasks_per_node] * num_nodes
    text = told.text(*_PER_NODE)
    if text is not None:
        return expand_tasks_per_node(text)
    total = num_tasks(told)
    if total is None or total % num_nodes:
        raise ClusterError(
            f"{_PER_NODE[0]} is not set, and {total} tasks do not tell how many are on each of "
            f"{num_nodes} nodes; {_WHY}, or pass tasks_per_node"
        )
    return [total // num_nodes] * num_nodes


def _chunk(told: EnvironmentVariables) -> int | None:
    """How many tasks in a row are on one node; ``None`` for all that are there."""
    name, _, size = (told.text("SLURM_DISTRIBUTION") or "").lower().partition("=")
    if name == "arbitrary":
        raise ClusterError(
            "SLURM_DISTRIBUTION=arbitrary takes nodes from a file, which no variable tells; start "
            "the workers with srun --distribution=block"
        )
    if name.startswith("cyclic"):
        return 1
    if name == "plane":
        planes = EnvironmentVariables({"SLURM_DISTRIBUTION": size} if size else told.environ)
        return planes.integer("SLURM_DISTRIBUTION" if size else "SLURM_DIST_PLANESIZE", least=1)
    return None


def _placed(counts: Sequence[int], chunk: int | None) -> list[tuple[int, int]]:
    """Gives the tasks to the nodes in turns of ``chunk``, to each as many as it takes."""
    chunk = chunk or max(counts, default=1)
    places = []
    for begin in range(0, max(counts, default=0), chunk):
        for node, count in enumerate(counts):
            places += [(node, local) for local in range(begin, min(begin + chunk, count))]
    return places


def _compare(told: EnvironmentVariables, step: SlurmStep) -> None:
    """Raises ClusterError where Slurm says otherwise of this process's place."""
    node, local = step.places[step.rank]
    way = told.text("SLURM_DISTRIBUTION") or "block"
    for name, expected in (("SLURM_NODEID", node), ("SLURM_LOCALID", local)):
        said = told.integer(name)
        if said is not None and said != expected:
            raise ClusterError(
                f"{name}={said}, but by {told.first(*_PER_NODE) or 'the number of tasks'} and "
                f"SLURM_DISTRIBUTION={way} task {step.rank} has {expected}; start the workers "
                "with srun --distribution=block"
            )
