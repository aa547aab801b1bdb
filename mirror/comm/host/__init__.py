"""Backends of the host: sums in place, and a plain one to compare with."""
