"""Strategies: the objects that users create."""
