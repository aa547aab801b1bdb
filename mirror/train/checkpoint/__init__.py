"""Checkpoints: the state of objects, saved and restored; a directory of them; preemption."""
