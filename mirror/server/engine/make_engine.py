"""Selection of an engine by its name."""

from __future__ import annotations

import os
import sys

from mirror.errors import BackendError
from mirror.server.engine.engine_types import Engine
from mirror.server.engine.process_engine import ProcessEngine

NAMES = ("auto", "process", "ray")


def make_engine(name: str = "auto") -> Engine:
    """Returns a new engine.

    Args:
        name: "process" starts processes on this machine. "ray" starts Ray actors, on the cluster
            that the program is connected to, or on this machine if it is connected to none.
            "auto" is "ray" if the program called ``ray.init`` or a Ray job started it, and
            "process" otherwise.

    Raises:
        BackendError: no engine has this name, or a package that it needs is not installed.
    """
    if name not in NAMES:
        raise BackendError(f"an engine is one of {', '.join(NAMES)}; got {name!r}")
    if name == "ray" or (name == "auto" and _uses_ray()):
        from mirror.server.engine.ray_engine import RayEngine  # imports Ray

        return RayEngine()
    return ProcessEngine()


def _uses_ray() -> bool:
    if "RAY_ADDRESS" in os.environ:
        return True
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", lambda: False)())
