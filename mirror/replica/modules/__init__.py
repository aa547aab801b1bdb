"""Mirrored modules: whose calls are split, and what is set on them."""
