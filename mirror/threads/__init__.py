"""Threads that take turns and meet at merge points; this layer knows no replica."""
