"""Keeps variables equal on all replicas; knows no strategy."""
