"""Captures a step: one trace below autograd for all replicas."""
