"""Places: on which machines of a cluster of Ray actors go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


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
