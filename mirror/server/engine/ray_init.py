"""Ray, begun on this machine so that it listens on loopback alone.

Places: on which machines of a cluster of Ray actors go.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAMESPACE = "mirror"
# Ray takes any address of the machine for its services, but for what it does on macOS; it reads
# this when it is imported, and its processes read it, too.
_CONSTANTS, _CONSTANT = "ray._private.ray_constants", "ENABLE_RAY_CLUSTER"
_LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Actors of Ray are nice to all others, by 15, and would stand still on a busy machine.
    "RAY_worker_niceness": "0",
}


def begin_here() -> None:
    """Starts Ray on this machine."""
    with _alone():
        ray.init(
            namespace=NAMESPACE,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
        )


@contextmanager
def _alone() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _LOCAL}
    constants = sys.modules.get(_CONSTANTS)
    was = getattr(constants, _CONSTANT, None)
    os.environ.update(_LOCAL)
    try:
        if was is not None:
            setattr(constants, _CONSTANT, False)
        yield
    finally:
        if was is not None:
            setattr(constants, _CONSTANT, was)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def machines_of(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the machines that take actors, of what ``ray.nodes`` says.

    Those that say they have no CPUs, as the head of a cluster is often told to, take none, unless
    nobody has any.
    """
    alive = [node for node in nodes if node["Alive"]]
    able = [node for node in alive if node["Resources"].get("CPU", 0) > 0]
    return sorted(node["NodeID"] for node in able or alive)


def place_of(number: int, num_cpus: float) -> Any:
    """Returns where an actor is to be, by its number: one machine after another.

    Of an actor that takes CPUs Ray knows where there are some. One that takes none it would put
    anywhere, often all on one machine. If a machine is gone, or so new that not all have heard of
    it, Ray puts its actor on another.
    """
    machines = machines_of(ray.nodes())
    if num_cpus or not machines:
        return "SPREAD"
    return NodeAffinitySchedulingStrategy(machines[number % len(machines)], soft=True)
