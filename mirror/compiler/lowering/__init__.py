"""Lowers a trace: it is cut at its collective points, and each piece becomes a program."""
