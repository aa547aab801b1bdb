"""Options of parameter servers: how many, and by which engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mirror.errors import short_repr

if TYPE_CHECKING:
    from mirror.server.cluster_tasks import Tasks
    from mirror.server.engine.engine_types import Engine


def tasks_of(cluster: Any, engine: object, counts: Sequence[object]) -> Tasks:
    """Returns where a cluster's servers and workers are.

    Raises:
        ValueError: as ``mirror.server.cluster_tasks``; or something else says how many there are,
            or starts them.
    """
    from mirror.server import cluster_tasks

    if any(count is not None for count in counts):
        raise ValueError("num_servers and num_workers are what cluster= says; give one of the two")
    found = cluster_tasks.tasks_of(cluster)
    if engine != "auto":
        raise ValueError(
            f"engine={short_repr(engine)} starts servers and workers itself, and not at the "
            "addresses of cluster=, where mirror.server.Server processes are waiting; leave out "
            f"engine=, or give num_servers={len(found.servers)}, num_workers={len(found.workers)}"
        )
    return found


def engine_of(cluster_tasks: Tasks) -> Engine:
    """Returns the engine whose actors are where a cluster's tasks are.

    Raises:
        WireError: there is no key.
    """
    from mirror.server.engine.agent_engine import AgentEngine
    from mirror.server.engine.socket_client import key_of_environment

    return AgentEngine(cluster_tasks.by_name(), key_of_environment())


def at_least(name: str, value: object, least: int = 1) -> int:
    """Returns an integer; ValueError for what is none, or too small."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer from {least} on, got {short_repr(value)}")
    return value


def check_engine(engine: object) -> None:
    """Raises ValueError for what is neither an engine nor the name of one."""
    names = ("auto", "process", "ray")
    if engine not in names and not hasattr(engine, "start"):
        raise ValueError(
            f"engine must be one of {', '.join(map(repr, names))}, or an engine; got "
            f"{short_repr(engine)}"
        )
