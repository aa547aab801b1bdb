"""Moves bytes between replicas; knows no model."""

from mirror.comm.base import Communicator
from mirror.comm.choose import available, create, register, unavailable_reason
from mirror.comm.host import host, naive  # noqa: F401  they register
from mirror.comm.kernels import direct, hierarchical, ring  # noqa: F401  they register
from mirror.comm.nccl import nccl  # noqa: F401  they register

__all__ = ["Communicator", "available", "create", "register", "unavailable_reason"]
