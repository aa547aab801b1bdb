"""Scatters the arguments of a split call over the replicas and gathers their outputs."""
