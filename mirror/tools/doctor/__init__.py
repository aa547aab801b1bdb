"""Examines the devices, the backends and torch, and reports what it finds."""
