"""Detection of the launcher that started this process, by its environment variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping

from mirror.cluster.kubernetes import KubernetesResolver
from mirror.cluster.resolver import ClusterResolver
from mirror.cluster.slurm import SlurmResolver
from mirror.cluster.tf_config import TFConfigResolver
from mirror.cluster.torchrun import TorchrunResolver
from mirror.cluster.variables import EnvironmentVariables


def _torchrun(env: EnvironmentVariables) -> bool:
    is_pod = env.first("PET_NODE_RANK") is not None and env.first("LOCAL_RANK") is None
    return env.first("RANK") is not None and not is_pod


def _kubernetes(env: EnvironmentVariables) -> bool:
    return env.first("PET_NODE_RANK", "JOB_COMPLETION_INDEX") is not None


# In order of precedence. The other launchers often start torchrun, and then its processes have
# their variables as well. In a Kubernetes Job, every container has an index, used or not.
_LAUNCHERS: dict[str, Callable[[EnvironmentVariables], bool]] = {
    "torchrun": _torchrun,
    "TF_CONFIG": lambda env: "TF_CONFIG" in env.environ,
    "Slurm": lambda env: env.first("SLURM_PROCID") is not None,
    "Kubernetes": _kubernetes,
    "torchrun, without RANK": lambda env: env.first("WORLD_SIZE") is not None,
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
