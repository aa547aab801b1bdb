"""To which strategy a module belongs: recorded in a scope, pending, or mirrored.

    recording        a thread records the modules that it creates inside a scope
    PendingModules   modules that are mirrored at the next use, or once they have values
    Interceptor      intercepts the calls of a mirrored module, also after ``module.compile()``

Modules are not mirrored immediately, because torch's registration hooks run before initial values
are written.

The dicts of a mirrored module return the current replica's copy of an entry. Dynamo traces the
reading of an entry, so it reads plain attributes and calls nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy

from mirror.base.dynamo import disable_dynamo, is_compiled_module
from mirror.base.mutex import Mutex
from mirror.base.torch_private import SPLIT_CALL, wrap_once
from mirror.errors import StrategyError
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica, Run, current
from mirror.execution.runner import Runner
from mirror.replica.modules.per_replica_values import ModuleAttributes
from mirror.replica.params.mirrored_buffer import MirroredBuffer
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.replica.params.torch_function import MirroredParameter

_Modules = dict[int, weakref.ref[nn.Module]]


class PendingModules:
    """The modules that were created in a strategy's scope, or changed, since its last use.

    A lazy module, or one with tensors on the meta device, has no values to mirror yet. It is
    checked again at every use, because initialization may fill its tensors in place.

    Attributes:
        modules: weak references to modules with values, by ``id``.
        unmade: the same for modules without values.
    """

    def __init__(self) -> None:
        self.modules: _Modules = {}
        self.unmade: _Modules = {}

    def __bool__(self) -> bool:
        return bool(self.modules or self.unmade)

    def add(self, module: nn.Module) -> bool:
        """Adds a module; returns whether it is new."""
        known = self.modules.get(id(module))
        is_new = known is None or known() is not module  # a freed module may have had this id
        if is_new:
            self.modules[id(module)] = weakref.ref(module)
        return is_new

    def retry(self, module: nn.Module) -> None:
        """Adds a module for the next use, if its own tensors have no values."""
        own = chain(module._parameters.values(), module._buffers.values())
        if any(map(is_uninitialized, own)):
            self.unmade[id(module)] = weakref.ref(module)

    def take(self) -> Iterator[nn.Module]:
        """Removes and yields the modules, including those that are added meanwhile."""
        unmade, self.unmade = self.unmade, {}
        self.modules = unmade | self.modules
        while self.modules:
            taken, self.modules = list(self.modules.values()), {}
            for reference in taken:
                module = reference()
                if module is not None:
                    yield module


def is_uninitialized(tensor: Tensor | None) -> bool:
    """Whether a tensor has no values yet."""
    if tensor is None or isinstance(tensor, MirroredTensor):
        return False
    return is_lazy(tensor) or tensor.is_meta


class MirroredModules(Protocol):
    """The modules of one strategy, as a module's calls, dicts and attributes see them.

    ``ModuleRegistry`` implements it; it is declared here because it creates those.

    Attributes:
        replicas: the replicas of the strategy.
        runner: runs the parts of a split call.
        attributes: the attributes that replicas set.
        pending: the modules that are mirrored at the next use.
        overridden: the ``ReplicaDict`` objects in which a parameter was replaced inside ``run``.
        verify: whether split calls are compared with one device, "first", "error" or "off".
    """

    verify: str
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

    def initialize(self, module: Any, replica: Replica | None, args: Any, kwargs: Any) -> None:
        """Initializes a lazy module when all replicas have called it, and mirrors it.

        Args:
            replica: the calling replica; ``None`` outside ``run`` of the only one.
        """


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


class ReplayedCalls:
    """Base of ``strategy.compile(module)``'s calls, to tell them from those of Dynamo."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, on a replica or where there is one only."""
        raise NotImplementedError

    def replay(
        self, run: Run, parts: dict[int, Any], make_part: Callable[[int], Any]
    ) -> dict[int, Callable[[], Any]] | None:
        """Returns the recorded calls of a split call; ``None`` if not every replica has one.

        Args:
            parts: gets the replicas' arguments, by replica id.
            make_part: returns a replica's arguments, in ``args`` and ``kwargs``.
        """
        raise NotImplementedError


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
    if wrap_once(nn.Module, "compile", _wrap_compile):
        register_module_module_registration_hook(_record_compiled)


def _wrap_compile(original: Callable[..., None]) -> Callable[..., None]:
    def compile_routed(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        route = interceptor_of(module)
        original(module, *args, **kwargs)
        if route is not None:
            route.recorder.route(module)

    return compile_routed


def _record_compiled(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    route = interceptor_of(submodule)
    if route is not None and is_compiled_module(module):  # torch.compile(submodule) is making it
        route.recorder.record(module)


class _Recording(threading.local):
    """The open scopes of a thread.

    Attributes:
        recorders: the modules of the strategies with open scopes, innermost last.
    """

    recorders: tuple[MirroredModules, ...] = ()


recording = _Recording()
_hooks: list[Any] = []
_hooks_lock = Mutex()
_open_scopes = 0


def _record(module: nn.Module, name: str, value: object) -> None:
    if recording.recorders and current.replica is None:
        recording.recorders[-1].record(module)


def begin_recording(recorder: MirroredModules) -> None:
    """Records the modules that this thread creates, until ``end_recording``."""
    _hooks_lock.call(_open_scope)
    recording.recorders = (*recording.recorders, recorder)


def _open_scope() -> None:
    global _open_scopes
    _open_scopes += 1
    if not _hooks:
        _hooks.extend(
            register(_record)
            for register in (
                torch_module.register_module_parameter_registration_hook,
                torch_module.register_module_buffer_registration_hook,
                torch_module.register_module_module_registration_hook,
            )
        )


@contextmanager
def suspend_recording() -> Iterator[None]:
    """Stops recording in this thread, for modules of a tracer or a compiler."""
    recorders, recording.recorders = recording.recorders, ()
    try:
        yield
    finally:
        recording.recorders = recorders


def end_recording() -> None:
    """Removes torch's hooks when no scope is open in any thread."""
    _hooks_lock.call(_close_scope)


def _close_scope() -> None:
    global _open_scopes
    _open_scopes -= 1
    if not _open_scopes:
        _remove(_hooks)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


class WatchedDict(dict[str, Any]):
    """A module's dict that records the module when an entry is set."""

    def __init__(
        self, entries: Mapping[str, Any], module: nn.Module, recorder: MirroredModules
    ) -> None:
        super().__init__(entries)
        self.module = weakref.ref(module)
        self.recorder = recorder

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        module = self.module()
        if module is not None:
            self.recorder.record(module)

    def update(self, *others: Any, **entries: Any) -> None:
        for name, value in dict(*others, **entries).items():
            self[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: deepcopy(value, memo) for name, value in self.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.items()),)


class ReplicaDict(WatchedDict):
    """The parameters or buffers of a mirrored module.

    Reading one entry returns the current replica's copy while a replica runs; ``items()`` and
    ``values()`` return the mirrored objects in every context, so ``parameters()`` is one list.

    Attributes:
        aggregations: by name, the choice of ``set_aggregation``; also for a buffer added later.
        overrides: by replica and name, the value that replaces a parameter inside ``run``;
            ``torch.func.functional_call`` does that until its call ends.
    """

    def __init__(
        self, entries: Mapping[str, Any], module: nn.Module, recorder: MirroredModules
    ) -> None:
        super().__init__(entries, module, recorder)
        self.replicas = recorder.replicas
        self.aggregations: dict[str, str] = {}
        self.overrides: dict[tuple[int, str], Any] = {}
        self._overridden = recorder.overridden

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        replica = current.replica
        if replica is None or not isinstance(value, MirroredTensor):
            return value
        record = value._mirrored  # type: ignore[attr-defined]
        if replica.replicas is not record.replicas:
            return value
        if self.overrides and (replica.replica_id, name) in self.overrides:
            return self.overrides[replica.replica_id, name]
        return record.copies[replica.replica_id]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  this is that get

    def __setitem__(self, name: str, value: Any) -> None:
        replica = current.replica
        if replica is None or replica.replicas is not self.replicas:
            if isinstance(value, ReplicaParameter):
                value = value.variable.owner()
            super().__setitem__(name, value)
            return
        existing = dict.get(self, name)
        if isinstance(existing, MirroredBuffer) and isinstance(value, torch.Tensor):
            existing._mirrored.assign(replica.replica_id, value)
        elif not isinstance(existing, MirroredParameter):
            super().__setitem__(name, value)
        elif value is existing or value is existing._mirrored.copies[replica.replica_id]:
            self.overrides.pop((replica.replica_id, name), None)
        else:
            self.overrides[replica.replica_id, name] = value
            self._overridden.append(self)

    def refuse_swaps(self) -> None:
        """Raises StrategyError for a parameter that is still replaced when ``run`` ends."""
        if self.overrides:
            (_, name), *_ = self.overrides
            self.overrides.clear()
            raise StrategyError(
                f"parameter {name!r} was replaced inside strategy.run, where each replica would "
                "have one of its own; replace parameters outside run"
            )


class OpaqueDict(ReplicaDict):
    """The parameters of a module that Dynamo must not trace.

    Dynamo skips the CallInterceptor and traces ``forward``; the graph breaks at the first read.
    """

    @disable_dynamo
    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)
