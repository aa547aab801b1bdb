"""Strategies that are MirroredStrategy over something else than the devices of one process."""
