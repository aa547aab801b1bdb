"""Mixed precision for mirrored models: the names of ``mirror.amp``."""

from typing import TYPE_CHECKING

from mirror.base.migration_hints import names_of
from mirror.replica.optimizers.grad_scaler import GradScaler

__all__ = ["GradScaler"]

if not TYPE_CHECKING:  # to which an unknown name is one
    __getattr__ = names_of("mirror.amp")
