"""The launchers of workers, detected by their environment variables, and torchrun's resolver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping

from mirror.cluster.kubernetes import KubernetesResolver
from mirror.cluster.rendezvous import (
    MAX_PORT,
    ClusterSpec,
    EnvironmentVariables,
    Rendezvous,
    single_process,
)
from mirror.cluster.resolver import ClusterResolver, TFConfigResolver
from mirror.cluster.slurm import SlurmResolver
from mirror.errors import ClusterError

_WHY = "torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: start every worker with it"


class TorchrunResolver(ClusterResolver):
    """Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

    Without RANK and WORLD_SIZE, there is only this process. All processes belong to job
    ``worker``. torchrun provides only the address of worker 0, so the other addresses in
    ``cluster_spec()`` are empty.

    Args:
        environ: read in place of this process's environment.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        self._variables = EnvironmentVariables(environ)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the workers, the first with its address; empty if there is only this process."""
        if not self._is_started_by_torchrun:
            return ClusterSpec({})
        rendezvous = self._check_environment()
        first = f"{rendezvous.master_address}:{rendezvous.master_port}"
        return ClusterSpec({"worker": [first, *[""] * (rendezvous.world_size - 1)]})

    def _read_task_type(self) -> str | None:
        return "worker" if self._is_started_by_torchrun else None

    def _read_task_id(self) -> int | None:
        return self._check_environment().rank if self._is_started_by_torchrun else None

    def rendezvous(self) -> Rendezvous:
        """Returns what the variables describe; ClusterError if one is missing or wrong."""
        is_set = self._task_type is not None or self._task_id is not None
        return super().rendezvous() if is_set else self._check_environment()

    def _check_environment(self) -> Rendezvous:
        if not self._is_started_by_torchrun:
            return single_process()
        env = self._variables
        size = env.require_integer("WORLD_SIZE", least=1, why=_WHY)
        rank = env.require_integer("RANK", why=_WHY)
        if rank >= size:
            raise ClusterError(f"RANK={rank}, but WORLD_SIZE={size} has ranks 0 to {size - 1}")
        if size == 1 and env.find_first("MASTER_ADDR", "MASTER_PORT") is None:
            return single_process()
        return Rendezvous(
            rank,
            size,
            env.require_text("MASTER_ADDR", why=_WHY),
            env.require_integer("MASTER_PORT", why=_WHY, least=int(size > 1), most=MAX_PORT),
            env.integer("LOCAL_RANK"),
            env.integer("LOCAL_WORLD_SIZE", least=1),
        )

    @property
    def _is_started_by_torchrun(self) -> bool:
        return self._variables.find_first("RANK", "WORLD_SIZE") is not None


def _torchrun(env: EnvironmentVariables) -> bool:
    is_pod = env.find_first("PET_NODE_RANK") is not None and env.find_first("LOCAL_RANK") is None
    return env.find_first("RANK") is not None and not is_pod


# In order of precedence. The other launchers often start torchrun, and then its processes have
# their variables as well. In a Kubernetes Job, every container has an index, used or not.
_LAUNCHERS: dict[str, Callable[[EnvironmentVariables], bool]] = {
    "torchrun": _torchrun,
    "TF_CONFIG": lambda env: "TF_CONFIG" in env.environ,
    "Slurm": lambda env: env.find_first("SLURM_PROCID") is not None,
    "Kubernetes": lambda env: env.find_first("PET_NODE_RANK", "JOB_COMPLETION_INDEX") is not None,
    "torchrun, without RANK": lambda env: env.find_first("WORLD_SIZE") is not None,
}


def launchers(environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns the launchers with variables in the environment, in order of precedence."""
    env = EnvironmentVariables(environ)
    names = [name for name, is_set in _LAUNCHERS.items() if is_set(env)]
    return [name for name in names if name == names[0] or "," not in name]


def resolver_of(launcher: str, environ: MutableMapping[str, str] | None = None) -> ClusterResolver:
    """Returns the resolver for a launcher; it does not change the environment.

    Raises:
        ClusterError: a variable of the launcher is wrong.
    """
    if launcher == "TF_CONFIG":
        return TFConfigResolver(environ=environ)
    if launcher == "Slurm":
        return SlurmResolver(auto_set_gpu=False, environ=environ)
    if launcher == "Kubernetes":
        return KubernetesResolver(environ=environ)
    return TorchrunResolver(environ=environ)
