"""Unchanged: what a step does in Python is done at the trace alone; so it must leave nothing.

[Note: Side effects]
A trace runs the step's Python code once; the programs never. What that code changes outside the
graph is put back after the trace, and refused if a call would be missing it afterwards:

    an attribute of a module        refused, unless the step leaves it as it was
    train(), eval()                 kept: every call does it
    a group of an optimizer         refused: schedulers step outside
    a global, a variable around     warned of
    a list, a file, anything else   cannot be seen; README says so
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mirror.steps.following.watching import refusal


class Unchanged:
    """Notes what a step finds in the modules that it calls, and puts it back.

    Args:
        step: the user's function.
        tracer: knows the modules that the step has called.
    """

    def __init__(self, step: Callable[..., Any], tracer: Any) -> None:
        self._step, self._tracer = step, tracer

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: Any) -> None: ...


_ = (nn, Tensor, refusal)
