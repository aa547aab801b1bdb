"""Lightning's Trainer and Fabric over mirrored devices; ``import mirror`` does not import it."""

from mirror.lightning.strategy import MirroredStrategy

__all__ = ["MirroredStrategy"]
