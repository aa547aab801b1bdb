"""Actors: objects in processes of their own, called over connections; knows no model."""
