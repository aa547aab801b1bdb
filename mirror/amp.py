"""The public names of ``mirror.amp``: mixed precision for mirrored models."""

from typing import TYPE_CHECKING

from mirror.base.migration_hints import names_of
from mirror.replica.optimizers.grad_scaler import GradScaler

__all__ = ["GradScaler"]

if not TYPE_CHECKING:  # type checkers must report unknown names
    __getattr__ = names_of("mirror.amp")
