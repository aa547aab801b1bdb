"""Runs a function on every replica; this layer knows no variable."""
