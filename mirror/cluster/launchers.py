"""Which launcher has started this process: the resolver that fits its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping

from mirror.cluster.kubernetes import KubernetesResolver
from mirror.cluster.resolver import ClusterResolver
from mirror.cluster.slurm import SlurmResolver
from mirror.cluster.tf_config import TFConfigResolver
from mirror.cluster.torchrun import TorchrunResolver
from mirror.cluster.variables import EnvironmentVariables


def _torchrun(told: EnvironmentVariables) -> bool:
    is_pod = told.first("PET_NODE_RANK") is not None and told.first("LOCAL_RANK") is None
    return told.first("RANK") is not None and not is_pod


def _kubernetes(told: EnvironmentVariables) -> bool:
    return told.first("PET_NODE_RANK", "JOB_COMPLETION_INDEX") is not None


# In the order in which they count. torchrun is often started by one of the others, for which its
# processes have the variables, too; Jobs of Kubernetes have an index whoever uses it.
_LAUNCHERS: dict[str, Callable[[EnvironmentVariables], bool]] = {
    "torchrun": _torchrun,
    "TF_CONFIG": lambda told: "TF_CONFIG" in told.environ,
    "Slurm": lambda told: told.first("SLURM_PROCID") is not None,
    "Kubernetes": _kubernetes,
    "torchrun, without RANK": lambda told: told.first("WORLD_SIZE") is not None,
}


def launchers(environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns the names of those whose variables are set, the one that counts first."""
    told = EnvironmentVariables(environ)
    found = [name for name, is_there in _LAUNCHERS.items() if is_there(told)]
    return [name for name in found if name == found[0] or "," not in name]


def resolver_of(launcher: str, environ: MutableMapping[str, str] | None = None) -> ClusterResolver:
    """Returns the resolver for a launcher, which leaves the environment as it is.

    Raises:
        ClusterError: what the launcher has set is wrong.
    """
    if launcher == "TF_CONFIG":
        return TFConfigResolver(environ=environ)
    if launcher == "Slurm":
        return SlurmResolver(auto_set_gpu=False, environ=environ)
    if launcher == "Kubernetes":
        return KubernetesResolver(environ=environ)
    return TorchrunResolver(environ=environ)
