"""Mirrored modules: their calls, dicts, attributes and copies."""
