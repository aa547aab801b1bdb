"""Mixed precision for mirrored models: the names of ``mirror.amp``."""

from mirror.replica.optimizer.grad_scaler import GradScaler

__all__ = ["GradScaler"]
