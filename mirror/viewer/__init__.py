"""Traces and reports as pictures and tables."""
