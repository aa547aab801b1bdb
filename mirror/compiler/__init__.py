"""Compiled steps: a training step is traced once and runs on all replicas as compiled programs."""
