"""The public names of ``mirror.nn``: layers and losses for mirrored models."""

from typing import TYPE_CHECKING

from mirror.base.migration_hints import names_of
from mirror.replica.layers.losses import compute_average_loss, scale_regularization_loss
from mirror.replica.layers.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = [
    "SyncBatchNorm",
    "compute_average_loss",
    "convert_sync_batchnorm",
    "scale_regularization_loss",
]

if not TYPE_CHECKING:  # type checkers must report unknown names
    __getattr__ = names_of("mirror.nn")
