"""Collectives between replicas: the contract, its backends, and the choice among them."""

from typing import TYPE_CHECKING

from mirror.base.migration_hints import names_of
from mirror.comm import host_backends  # noqa: F401  registers backends
from mirror.comm.communicator import Communicator
from mirror.comm.kernels import kernel_backends  # noqa: F401  registers backends
from mirror.comm.nccl import nccl_backend  # noqa: F401  registers backends
from mirror.comm.registry import available, create, register, unavailable_reason

__all__ = ["Communicator", "available", "create", "register", "unavailable_reason"]

if not TYPE_CHECKING:  # type checkers still report unknown names
    __getattr__ = names_of("mirror.comm")
