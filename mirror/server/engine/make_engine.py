"""Which engine is used, by its name."""

from __future__ import annotations

import importlib
import os
import sys

from mirror.errors import BackendError
from mirror.server.engine.engine_types import Engine
from mirror.server.engine.process_engine import ProcessEngine

NAMES = ("auto", "process", "ray")


def make_engine(name: str = "auto") -> Engine:
    """Returns a new engine.

    Args:
        name: "process": processes of this machine. "ray": actors of Ray, on the cluster that the
            program is connected to, else on this machine. "auto": of Ray if the program has
            called ``ray.init`` or was started by a job of Ray, else processes.

    Raises:
        BackendError: there is none of this name, or what it needs is not installed.
    """
    if name not in NAMES:
        raise BackendError(f"an engine is one of {', '.join(NAMES)}; got {name!r}")
    if name == "ray" or (name == "auto" and _has_ray_begun()):
        ray_engine = importlib.import_module("mirror.server.engine.ray_engine")
        engine: Engine = ray_engine.RayEngine()
        return engine
    return ProcessEngine()


def _has_ray_begun() -> bool:
    if "RAY_ADDRESS" in os.environ:
        return True
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", lambda: False)())
