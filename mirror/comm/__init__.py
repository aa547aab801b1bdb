"""Moves bytes between replicas; knows no model."""

from typing import TYPE_CHECKING

from mirror.comm.base import Communicator
from mirror.comm.choose import available, create, register, unavailable_reason
from mirror.comm.host import host, naive  # noqa: F401  they register
from mirror.comm.kernels import direct, hierarchical, ring  # noqa: F401  they register
from mirror.comm.nccl import nccl  # noqa: F401  they register
from mirror.signposts import names_of

__all__ = ["Communicator", "available", "create", "register", "unavailable_reason"]

if not TYPE_CHECKING:  # to which an unknown name is one
    __getattr__ = names_of("mirror.comm")
