"""Feeds batches to the replicas; knows no model."""

from mirror.data.distribute import DistributedDataset

__all__ = ["DistributedDataset"]
