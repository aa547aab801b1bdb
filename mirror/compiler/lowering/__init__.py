"""Lowers a trace: it is cut where replicas meet, and each piece becomes a program."""
