"""mirror.TPUStrategy: whole steps on TPUs, through torchax and jax. docs/tpu.md describes it."""

from mirror_tpu.strategy import TPUStrategy

__all__ = ["TPUStrategy"]
