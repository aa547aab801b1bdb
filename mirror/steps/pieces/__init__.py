"""A traced step in pieces: cut where the replicas meet, each piece a program."""
