"""Reduced gradients at home, where parameters have a storage of their own."""
