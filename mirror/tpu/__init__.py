"""TPUStrategy, experimental: whole steps as one program of jax, over torchax. docs/tpu.md."""
