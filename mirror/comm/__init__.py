"""Moves bytes between replicas; knows no model."""

from typing import TYPE_CHECKING

from mirror.base.migration_hints import names_of
from mirror.comm.communicator import Communicator
from mirror.comm.host import host_backend, naive_backend  # noqa: F401  they register
from mirror.comm.kernels import direct_backend, hierarchical_backend, ring_backend  # noqa: F401  they register
from mirror.comm.nccl import nccl_backend  # noqa: F401  they register
from mirror.comm.registry import available, create, register, unavailable_reason

__all__ = ["Communicator", "available", "create", "register", "unavailable_reason"]

if not TYPE_CHECKING:  # to which an unknown name is one
    __getattr__ = names_of("mirror.comm")
