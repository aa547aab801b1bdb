"""Distributed datasets: passes over a dataset, read ahead, as they go to the replicas."""
