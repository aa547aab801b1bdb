"""TPUStrategy, experimental: whole steps as one program of jax, over torchax. See docs/tpu.md."""
