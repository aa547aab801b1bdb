"""Parameter servers: variables on servers, steps on workers, a coordinator that schedules them."""

from typing import TYPE_CHECKING

from mirror.server.partitioners import FixedShards, MaxSize, MinSize
from mirror.server.roles.coordinator import ClusterCoordinator
from mirror.server.roles.datasets import PerWorkerDataset, PerWorkerValues
from mirror.server.roles.remote_value import RemoteValue
from mirror.server.roles.serving import Server
from mirror.signposts import names_of

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

if not TYPE_CHECKING:  # to which an unknown name is one
    __getattr__ = names_of("mirror.server")
