"""Runs the programs of a compiled step on the replicas."""
