"""Threads that take turns and meet at merge points; knows no replica."""
