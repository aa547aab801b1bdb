"""Mirrored parameters and buffers: one object for the user, one copy per replica."""
