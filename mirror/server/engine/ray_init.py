"""How Ray is started on this machine, and to which nodes of a Ray cluster actors go."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAMESPACE = "mirror"
# On Linux, Ray's services listen on all networks. On macOS they listen on loopback only, unless
# this constant is set. Ray reads it when it is imported, in its own processes as well.
_CONSTANTS, _CONSTANT = "ray._private.ray_constants", "ENABLE_RAY_CLUSTER"
_LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray gives its actors niceness 15, so that they would hardly run on a busy machine.
    "RAY_worker_niceness": "0",
}


def init_local() -> None:
    """Starts Ray on this machine; its services listen on loopback only."""
    with _local_settings():
        ray.init(
            namespace=NAMESPACE,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
        )


@contextmanager
def _local_settings() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _LOCAL}
    constants = sys.modules.get(_CONSTANTS)
    constant = getattr(constants, _CONSTANT, None)
    os.environ.update(_LOCAL)
    try:
        if constant is not None:
            setattr(constants, _CONSTANT, False)
        yield
    finally:
        if constant is not None:
            setattr(constants, _CONSTANT, constant)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def nodes_for_actors(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the ids of the nodes that run actors, from the result of ``ray.nodes``.

    A node that declares no CPUs, as the head of a cluster often does, runs none, unless no node
    has CPUs.
    """
    alive = [node for node in nodes if node["Alive"]]
    with_cpus = [node for node in alive if node["Resources"].get("CPU", 0) > 0]
    return sorted(node["NodeID"] for node in with_cpus or alive)


def scheduling_strategy(number: int, num_cpus: float) -> Any:
    """Returns Ray's scheduling strategy for an actor: actors go to the nodes in turn.

    If an actor needs CPUs, Ray finds a node with free ones. Without this strategy, Ray often puts
    all actors that need none on one node. If the node has left, or Ray does not know it yet, Ray
    selects another.

    Args:
        number: the index of the actor in its engine.
        num_cpus: how many CPUs the actor needs.
    """
    nodes = nodes_for_actors(ray.nodes())
    if num_cpus or not nodes:
        return "SPREAD"
    return NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=True)
