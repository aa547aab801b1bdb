"""Ray, begun on this machine so that it listens on loopback alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import ray

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
