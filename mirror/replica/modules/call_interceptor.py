"""Routing: whose modules are, and that calls of them stay split when they are compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from mirror.base.dynamo import is_compiled
from mirror.base.torch_private import SPLIT_CALL, wrap_once
from mirror.execution.replicas import Replicas


class ModuleRecorder(Protocol):
    """Who keeps modules mirrored."""

    @property
    def replicas(self) -> Replicas:
        """Whose the modules are."""

    def record(self, module: nn.Module) -> None:
        """Notes a module to be mirrored at the next use."""

    def route(self, module: nn.Module) -> None:
        """Has calls of a module split."""


class Interceptor:
    """What calls of a mirrored module go through: it is in place of its ``_compiled_call_impl``.

    Attributes:
        module: returns the module, ``None`` once it is gone.
        recorder: who keeps it mirrored.
    """

    __slots__ = ("module", "recorder", "replicas")

    def __init__(self, module: nn.Module, recorder: ModuleRecorder) -> None:
        self.module = weakref.ref(module)
        self.recorder = recorder
        self.replicas = recorder.replicas


def interceptor_of(module: nn.Module | None) -> Interceptor | None:
    """Returns what calls of a module go through; one that came with a copied dict does not count.

    See [Note: Copied routes].
    """
    route = None if module is None else module.__dict__.get(SPLIT_CALL)
    return route if isinstance(route, Interceptor) and route.module() is module else None


def owner_of(module: nn.Module | None) -> Replicas | None:
    """Returns the replicas that calls of a module are split over."""
    route = interceptor_of(module)
    return None if route is None else route.replicas


def watch_compile() -> None:
    """Keeps calls of mirrored modules split when they are compiled; once, for good."""
    if wrap_once(nn.Module, "compile", _routed_again):
        register_module_module_registration_hook(_record_compiled)


def _routed_again(original: Callable[..., None]) -> Callable[..., None]:
    def compile_routed(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        route = interceptor_of(module)
        original(module, *args, **kwargs)
        if route is not None:
            route.recorder.route(module)

    return compile_routed


def _record_compiled(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    route = interceptor_of(submodule)
    if route is not None and is_compiled(module):  # torch.compile(submodule) is making it
        route.recorder.record(module)
