"""Mixed precision for mirrored models: the names of ``mirror.amp``."""

from mirror.replica.grad_scaler import GradScaler

__all__ = ["GradScaler"]
