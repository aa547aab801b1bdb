"""Routing: which strategy the calls of a module are split by, also when it is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from mirror.compiler import is_compiled

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup


def group_of(module: nn.Module | None) -> ReplicaGroup | None:
    """Returns the group that calls of a module are routed through."""
    call = None if module is None else module.__dict__.get("_compiled_call_impl")
    group: ReplicaGroup | None = getattr(call, "group", None)
    return group


def watch_compile(route: Callable[[nn.Module, ReplicaGroup], None]) -> None:
    """Keeps calls of mirrored modules split when they are compiled; once, for good.

    Args:
        route: routes the calls of a module through a group.
    """
    original = nn.Module.compile
    if hasattr(original, "_is_watched"):
        return

    @functools.wraps(original)
    def compile_routed(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        group = group_of(module)
        original(module, *args, **kwargs)
        if group is not None:
            route(module, group)

    def route_compiled(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        group = group_of(submodule)
        if group is not None and is_compiled(module):  # torch.compile(submodule) is making it
            group.record(module)

    compile_routed._is_watched = True  # type: ignore[attr-defined]
    nn.Module.compile = compile_routed  # type: ignore[method-assign, assignment]
    register_module_module_registration_hook(route_compiled)
