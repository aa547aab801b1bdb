"""Layers and losses for mirrored models: the names of ``mirror.nn``."""

from mirror.replica.losses import compute_average_loss, scale_regularization_loss
from mirror.replica.normalization import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    "SyncBatchNorm",
    "compute_average_loss",
    "convert_sync_batchnorm",
    "scale_regularization_loss",
]
