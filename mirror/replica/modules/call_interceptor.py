"""Interceptors: to which strategy a module belongs, and how its compiled calls stay split."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from mirror.base.dynamo import is_compiled
from mirror.base.torch_private import SPLIT_CALL, wrap_once
from mirror.execution.replicas import Replica, Replicas
from mirror.execution.runner import Runner
from mirror.replica.modules.per_replica_values import ModuleAttributes
from mirror.replica.params.pending_modules import PendingModules


class MirroredModules(Protocol):
    """The modules of one strategy, as a module's calls, dicts and attributes see them.

    ``ModuleRegistry`` implements it; it is declared here because it creates those.

    Attributes:
        replicas: the replicas of the strategy.
        runner: runs the parts of a split call.
        attributes: the attributes that replicas set.
        pending: the modules that are mirrored at the next use.
        overridden: the ``ReplicaDict`` objects in which a parameter was replaced inside ``run``.
    """

    replicas: Replicas
    runner: Runner
    attributes: ModuleAttributes
    pending: PendingModules
    overridden: list[Any]

    def record(self, module: nn.Module) -> None:
        """Records a module to be mirrored at the next use."""

    def mirror_recorded(self) -> None:
        """Mirrors the recorded modules."""

    def route(self, module: nn.Module) -> None:
        """Makes calls of a module split calls."""

    def initialize(self, module: Any, replica: Replica, args: Any, kwargs: Any) -> None:
        """Initializes a lazy module when all replicas have called it, and mirrors it."""


class Interceptor:
    """Intercepts the calls of a mirrored module: it is the module's ``_compiled_call_impl``.

    Attributes:
        module: returns the module, ``None`` once it is gone.
        recorder: the modules of its strategy.
    """

    __slots__ = ("module", "recorder", "replicas")

    def __init__(self, module: nn.Module, recorder: MirroredModules) -> None:
        self.module = weakref.ref(module)
        self.recorder = recorder
        self.replicas = recorder.replicas


def interceptor_of(module: nn.Module | None) -> Interceptor | None:
    """Returns a module's interceptor, except one that came with a copied ``__dict__``.

    See ``split_call.py``.
    """
    route = None if module is None else module.__dict__.get(SPLIT_CALL)
    return route if isinstance(route, Interceptor) and route.module() is module else None


def owner_of(module: nn.Module | None) -> Replicas | None:
    """Returns the replicas that calls of a module are split over."""
    route = interceptor_of(module)
    return None if route is None else route.replicas


def watch_compile() -> None:
    """Keeps calls of mirrored modules split when these are compiled; once, permanently."""
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
