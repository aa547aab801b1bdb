"""Actors at given addresses, where somebody has started a process for each."""
