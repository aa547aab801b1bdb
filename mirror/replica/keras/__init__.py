"""Keras 3 on torch: what its layers and optimizers do that torch's do not."""
