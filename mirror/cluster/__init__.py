"""The cluster of this process: specs, and resolvers for the launchers that start workers.

::

    resolver = mirror.cluster.SlurmResolver()
    resolver.cluster_spec().num_tasks("worker"), resolver.task_id
    resolver.apply()  # sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT for torch.distributed

A variable that a launcher left out or set wrongly raises ``ClusterError`` with its name.
"""

from typing import TYPE_CHECKING

from mirror.base.migration_hints import names_of
from mirror.cluster.kubernetes import KubernetesResolver
from mirror.cluster.launchers import TorchrunResolver
from mirror.cluster.rendezvous import ClusterSpec, Rendezvous
from mirror.cluster.resolver import (
    ClusterResolver,
    SimpleResolver,
    TFConfigResolver,
    UnionResolver,
)
from mirror.cluster.slurm import SlurmResolver
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

if not TYPE_CHECKING:  # type checkers still report unknown names
    __getattr__ = names_of("mirror.cluster")
