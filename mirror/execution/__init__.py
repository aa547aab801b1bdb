"""Runs a function on every replica; knows no variable."""
