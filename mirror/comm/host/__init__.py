"""Backends of the host: reductions in place by C++, and the plain reference."""
