"""Layers of Keras for mirrored models: the names of ``mirror.keras``. Imports Keras."""

from mirror.replica.keras.normalization import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
