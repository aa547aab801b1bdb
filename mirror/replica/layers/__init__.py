"""Layers and losses that span the replicas."""
