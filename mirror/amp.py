"""Mixed precision for mirrored models: the names of ``mirror.amp``."""

from typing import TYPE_CHECKING

from mirror.replica.optimizer.grad_scaler import GradScaler
from mirror.signposts import names_of

__all__ = ["GradScaler"]

if not TYPE_CHECKING:  # to which an unknown name is one
    __getattr__ = names_of("mirror.amp")
