"""Whether replicas hold equal bits, and whether their losses combine into that of the batch."""
