"""Looks at the devices, the backends and torch itself, and says what it found."""
