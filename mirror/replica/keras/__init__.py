"""Keras 3 on torch: calls of its layers, its metrics, optimizers and normalization."""
