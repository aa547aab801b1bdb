"""Which cluster this process is in: specs, and resolvers for the launchers that start workers.

::

    resolver = mirror.cluster.SlurmResolver()
    resolver.cluster_spec().num_tasks("worker"), resolver.task_id
    resolver.apply()  # sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT for torch.distributed

What a launcher says wrong, or not at all, is a ``ClusterError`` that names the variable.
"""

from typing import TYPE_CHECKING

from mirror.base.migration_hints import names_of
from mirror.cluster.kubernetes import KubernetesResolver
from mirror.cluster.rendezvous import Rendezvous
from mirror.cluster.resolver import ClusterResolver
from mirror.cluster.simple import SimpleResolver, UnionResolver
from mirror.cluster.slurm import SlurmResolver
from mirror.cluster.spec import ClusterSpec
from mirror.cluster.tf_config import TFConfigResolver
from mirror.cluster.torchrun import TorchrunResolver
from mirror.errors import ClusterError

__all__ = [
    "ClusterError",
    "ClusterResolver",
    "ClusterSpec",
    "KubernetesResolver",
    "Rendezvous",
    "SimpleResolver",
    "SlurmResolver",
    "TFConfigResolver",
    "TorchrunResolver",
    "UnionResolver",
]

if not TYPE_CHECKING:  # to which an unknown name is one
    __getattr__ = names_of("mirror.cluster")
