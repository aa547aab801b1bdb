"""Parameter servers: variables on servers, steps on workers, a coordinator that schedules them."""

from typing import TYPE_CHECKING

from mirror.base.migration_hints import names_of
from mirror.server.roles.closure_queue import RemoteValue
from mirror.server.roles.coordinator import ClusterCoordinator
from mirror.server.roles.serve import Server
from mirror.server.roles.worker_datasets import PerWorkerDataset, PerWorkerValues
from mirror.server.variable_placement import FixedShards, MaxSize, MinSize

__all__ = [
    "ClusterCoordinator",
    "FixedShards",
    "MaxSize",
    "MinSize",
    "PerWorkerDataset",
    "PerWorkerValues",
    "RemoteValue",
    "Server",
]

if not TYPE_CHECKING:  # type checkers still report unknown names
    __getattr__ = names_of("mirror.server")
