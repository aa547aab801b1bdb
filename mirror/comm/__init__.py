"""Moves bytes between replicas; knows no model."""

from mirror.comm import direct, hierarchical, host, naive, nccl, ring  # noqa: F401  they register
from mirror.comm.base import Communicator
from mirror.comm.choose import available, create, register, unavailable_reason

__all__ = ["Communicator", "available", "create", "register", "unavailable_reason"]
