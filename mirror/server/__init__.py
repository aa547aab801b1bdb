"""Parameter servers: variables on servers, steps on workers, a coordinator that schedules them."""

from mirror.server.partitioners import FixedShards, MaxSize, MinSize

__all__ = ["FixedShards", "MaxSize", "MinSize"]
