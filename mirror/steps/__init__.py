"""Compiled steps: a training step traced once, and run on all replicas as compiled programs."""
