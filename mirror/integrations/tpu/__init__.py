"""TPUStrategy, experimental: whole steps as one jax program, through torchax. See docs/tpu.md."""
