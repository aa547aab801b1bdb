"""TorchrunResolver: the cluster of a process that torchrun has started."""

from __future__ import annotations

from collections.abc import Mapping

from mirror.cluster.rendezvous import Rendezvous, alone
from mirror.cluster.resolver import ClusterResolver
from mirror.cluster.spec import ClusterSpec
from mirror.cluster.variables import MAX_PORT, EnvironmentVariables
from mirror.errors import ClusterError

_WHY = "torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: start every worker with it"


class TorchrunResolver(ClusterResolver):
    """Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

    Without RANK and WORLD_SIZE this process is alone. All processes are of job ``worker``.
    torchrun says where worker 0 is and no other: their addresses are empty in ``cluster_spec()``.

    Args:
        environ: read instead of this process's environment.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        self._variables = EnvironmentVariables(environ)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the workers, of which the first has its address; none where it is alone."""
        if not self._is_there:
            return ClusterSpec({})
        found = self._check_environment()
        first = f"{found.master_address}:{found.master_port}"
        return ClusterSpec({"worker": [first, *[""] * (found.world_size - 1)]})

    @property
    def task_type(self) -> str | None:
        """``"worker"``, or ``None`` where this process is alone."""
        return "worker" if self._task_type is None and self._is_there else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """RANK, or ``None`` where this process is alone."""
        is_told = self._task_id is None and self._is_there
        return self._check_environment().rank if is_told else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def rendezvous(self) -> Rendezvous:
        """Returns what the variables say; ClusterError for those that are missing or wrong."""
        is_set = self._task_type is not None or self._task_id is not None
        return super().rendezvous() if is_set else self._check_environment()

    def _check_environment(self) -> Rendezvous:
        if not self._is_there:
            return alone()
        told = self._variables
        size = told.needed_integer("WORLD_SIZE", least=1, why=_WHY)
        rank = told.needed_integer("RANK", why=_WHY)
        if rank >= size:
            raise ClusterError(f"RANK={rank}, but WORLD_SIZE={size} has ranks 0 to {size - 1}")
        if size == 1 and told.first("MASTER_ADDR", "MASTER_PORT") is None:
            return alone()
        return Rendezvous(
            rank,
            size,
            told.needed("MASTER_ADDR", why=_WHY),
            told.needed_integer("MASTER_PORT", why=_WHY, least=int(size > 1), most=MAX_PORT),
            told.integer("LOCAL_RANK"),
            told.integer("LOCAL_WORLD_SIZE", least=1),
        )

    @property
    def _is_there(self) -> bool:
        return self._variables.first("RANK", "WORLD_SIZE") is not None
