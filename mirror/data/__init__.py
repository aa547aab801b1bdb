"""mirror.data: feeds batches to the replicas; knows no model."""

from mirror.data.arrays import from_arrays
from mirror.data.distribute import DistributedDataset

__all__ = ["DistributedDataset", "from_arrays"]
