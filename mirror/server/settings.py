"""Settings: how the servers and workers of a strategy work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """How a strategy's servers work; see ``ParameterServerStrategy``."""

    num_servers: int
    num_workers: int
    engine: Any = "auto"
    to_aggregate: int | None = None
    max_staleness: int | None = None
    partitioner: Any = None
    placement: Any = "round_robin"

    @property
    def is_sync(self) -> bool:
        return self.to_aggregate is not None
