"""Parameter servers: variables on servers, steps on workers, a coordinator that schedules them."""

from mirror.server.partitioners import FixedShards, MaxSize, MinSize
from mirror.server.roles.coordinator import ClusterCoordinator
from mirror.server.roles.datasets import PerWorkerDataset, PerWorkerValues
from mirror.server.roles.remote_value import RemoteValue
from mirror.server.roles.serving import Server

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
