"""Keeps one module's variables equal on all replicas and runs code on each; knows no strategy."""
