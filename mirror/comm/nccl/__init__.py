"""NCCL: the library, its communicators, the backend."""
