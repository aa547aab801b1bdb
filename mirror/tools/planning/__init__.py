"""Predicts a measured step on 1 to 1,024 devices."""
