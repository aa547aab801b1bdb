"""Layers and losses for mirrored models: the names of ``mirror.nn``."""

from typing import TYPE_CHECKING

from mirror.replica.layers.losses import compute_average_loss, scale_regularization_loss
from mirror.replica.layers.normalization import SyncBatchNorm, convert_sync_batchnorm
from mirror.signposts import names_of

__all__ = [
    "SyncBatchNorm",
    "compute_average_loss",
    "convert_sync_batchnorm",
    "scale_regularization_loss",
]

if not TYPE_CHECKING:  # to which an unknown name is one
    __getattr__ = names_of("mirror.nn")
