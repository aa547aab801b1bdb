"""Mirrored modules: the dicts that hand out the current replica's copies, and recording scopes.

A module stays the object it is; ``type``, ``state_dict`` and ``parameters()`` do not change.
Plain tensors among its attributes become mirrored like buffers. Three of its dicts and one
instance attribute are replaced:

    _parameters, _buffers   ReplicaDict: reads the current replica's copy while one runs
    _modules                WatchedDict: notes a submodule put in later
    _compiled_call_impl     TransparentCall: splits the call in the cross-replica context.
                            ``Module.__call__`` looks at it first; copies and pickles have None.

Of torch itself these are wrapped when the first module is mirrored: the module's ``compile``,
``__setattr__``, ``__delattr__`` and ``_apply``, and what custom functions are called through. See
[Note: Compiled calls], [Note: Own attributes] and [Note: Custom functions].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from mirror.compiler import (
    is_compiled,
    let_go,
    letting_go,
    not_compiled,
    opaque,
    refuse_unknown_compiler,
    take_hold,
)
from mirror.errors import StrategyError
from mirror.execution.current import current, entered
from mirror.execution.nesting import refuse_within_another
from mirror.execution.run import recomputing
from mirror.replica.copies.buffers import MirroredBuffer
from mirror.replica.copies.parameters import MirroredParameter, ReplicaParameter
from mirror.replica.copies.recorded import is_unmade
from mirror.replica.functions import watch_functions
from mirror.replica.layers.embedding import renormalize_everywhere, renormalizes
from mirror.replica.layers.normalization import watch_torchs_own
from mirror.replica.modules.attributes import OwnValues, is_own, watch_attributes
from mirror.replica.modules.conversions import watch_conversions
from mirror.replica.modules.metric_calls import call_once, is_metric, watch_metric
from mirror.replica.modules.recompute import replica_of_backward, saves_are_hooked
from mirror.replica.modules.split_call import call_in_turn
from mirror.replica.modules.wrappers import refuse_wrapper, watch_wrappers
from mirror.replica.routing import watch_compile
from mirror.replica.tensors import MirroredTensor

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup


class WatchedDict(dict[str, Any]):
    """A module's dict that tells the group when an entry is set."""

    def __init__(self, entries: Mapping[str, Any], module: nn.Module, group: ReplicaGroup) -> None:
        super().__init__(entries)
        self.module = weakref.ref(module)
        self.group = group

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        module = self.module()
        if module is not None:
            self.group.record(module)

    def update(self, *others: Any, **entries: Any) -> None:
        for name, value in dict(*others, **entries).items():
            self[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: deepcopy(value, memo) for name, value in self.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.items()),)


class ReplicaDict(WatchedDict):
    """The parameters or buffers of a mirrored module.

    Reading one entry gives the current replica's copy while a replica runs; ``items()`` and
    ``values()`` give the mirrored objects in every context, so ``parameters()`` is one list.

    Attributes:
        aggregations: by name, what ``set_aggregation`` chose; holds for a buffer put in later.
        swapped: by replica and name, what took a parameter's place inside ``run``, as
            ``torch.func.functional_call`` does until its call ends.
    """

    def __init__(self, entries: Mapping[str, Any], module: nn.Module, group: ReplicaGroup) -> None:
        super().__init__(entries, module, group)
        self.aggregations: dict[str, str] = {}
        self.swapped: dict[tuple[int, str], Any] = {}

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        replica = current.replica
        if replica is None or not isinstance(value, MirroredTensor):
            return value
        record = value._mirrored  # type: ignore[attr-defined]
        if replica.replicas is not record.replicas:
            return value
        if self.swapped and (replica.replica_id, name) in self.swapped:
            return self.swapped[replica.replica_id, name]
        return record.copies[replica.replica_id]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  this is that get

    def __setitem__(self, name: str, value: Any) -> None:
        replica = current.replica
        if replica is None or replica.group is not self.group:
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
            self.swapped.pop((replica.replica_id, name), None)
        else:
            self.swapped[replica.replica_id, name] = value
            self.group.swaps.append(self)

    def refuse_swaps(self) -> None:
        """Raises for a parameter that was replaced inside ``run`` and not put back."""
        if self.swapped:
            (_, name), *_ = self.swapped
            self.swapped.clear()
            raise StrategyError(
                f"parameter {name!r} was replaced inside strategy.run, where each replica would "
                "have one of its own; replace parameters outside run"
            )


class OpaqueDict(ReplicaDict):
    """The parameters of a module whose calls the compiler must not follow.

    It goes past the TransparentCall, to ``forward``, and ends where that reads one of these.
    """

    @opaque
    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)


class TransparentCall:
    """What calling a mirrored module does: splits the outermost call, else just runs."""

    __slots__ = ("group", "is_checkpointed", "is_plain", "module", "own", "renormalizes")

    def __init__(self, module: nn.Module, group: ReplicaGroup) -> None:
        self.module = weakref.ref(module)
        self.group = group
        self.renormalizes = renormalizes(module)
        is_lazy_kind = isinstance(module, LazyModuleMixin)
        self.is_plain = not (self.renormalizes or is_lazy_kind or is_metric(module))
        self.own: dict[str, OwnValues] = {}  # see [Note: Own attributes]
        self.is_checkpointed = False  # whether a whole call may be recomputed in backward

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        replica = current.replica
        if replica is None or replica.group is not self.group:
            return self._call_outside(module, args, kwargs)
        if not self.is_plain:
            if is_metric(module):
                return call_once(replica, module, module._call_impl, args, kwargs)
            self._make_ready(module, replica, args, kwargs)
        return module._call_impl(*args, **kwargs)

    # Copies and pickles of a module are ordinary, also where its class has a __getstate__ or
    # __deepcopy__ that takes all there is: what an ordinary module has in this place is None.

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()

    def _make_ready(self, module: nn.Module, replica: Any, args: Any, kwargs: Any) -> None:
        if isinstance(module, LazyModuleMixin):
            self._initialize(module, replica, args, kwargs)
        if self.renormalizes:
            renormalize_everywhere(module, replica, args[0] if args else kwargs["input"])

    @letting_go
    def _call_outside(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        hold = let_go()
        try:
            whole = self.whole(module)
            if current.in_whole_call:
                return whole(*args, **kwargs)
            if current.replica is not None and torch.is_grad_enabled():
                refuse_within_another(self.group.replicas, f"a {type(module).__name__}")
            of = replica_of_backward(self.group)
            if of is None or self.is_checkpointed:
                if saves_are_hooked():
                    self.is_checkpointed = True
                return call_in_turn(self.group, module, args, kwargs, whole=whole, hold=hold)
            with entered(self.group.strategy, recomputing(self.group.replicas, of)):
                return whole(*args, **kwargs)
        finally:
            take_hold(hold)

    def whole(self, module: nn.Module) -> Callable[..., Any]:
        """Returns what calls the module without splitting."""
        call: Callable[..., Any] = module._call_impl
        return call

    def _initialize(self, module: Any, replica: Any, args: Any, kwargs: Any) -> None:
        """Gives a lazy module its parameters, by the first replica to come by, and mirrors."""
        with self.group.lazy_lock, replica.run.drawing_for_all(replica.replica_id):
            if module.has_uninitialized_params():
                module._infer_parameters(module, args, kwargs)
                mirror_own(module, self.group, type(module).__name__)


class CompiledCall(TransparentCall):
    """What calling a mirrored module does after ``module.compile()``.

    Attributes:
        compiled: what ``module.compile()`` made of the module's call; each replica's.
    """

    __slots__ = ("compiled",)

    def __init__(
        self, module: nn.Module, group: ReplicaGroup, compiled: Callable[..., Any]
    ) -> None:
        super().__init__(module, group)
        self.compiled = compiled

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replica = current.replica
        if replica is None or replica.group is not self.group or self.renormalizes:
            return super().__call__(*args, **kwargs)
        return self.compiled(*args, **kwargs)

    def whole(self, module: nn.Module) -> Callable[..., Any]:
        return self.compiled


def mirror_module(module: nn.Module, group: ReplicaGroup) -> None:
    """Mirrors a module and all below it, in place. What is mirrored already is left alone."""
    watch_functions()
    watch_conversions()
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            if all(map(group.owns, (*submodule.parameters(), *submodule.buffers()))):
                continue  # traced from a mirrored module, inside the scope
            raise StrategyError(
                f"{name or type(module).__name__} is a ScriptModule, whose variables live in C++; "
                "mirror the Python module it was made from"
            )
        refuse_wrapper(submodule, name)
        mirror_own(submodule, group, name)


def mirror_own(module: nn.Module, group: ReplicaGroup, path: str) -> None:
    """Mirrors the variables that a module holds itself."""
    attributes = module.__dict__
    parameters, buffers = attributes["_parameters"], attributes["_buffers"]
    for name, parameter in parameters.items():
        # What is no Parameter is put there for one call, by torch.func.functional_call.
        if isinstance(parameter, nn.Parameter) and _is_new(parameter, group, name):
            group.variables.mirror(parameter, f"{path}.{name}".lstrip("."))
    for name, buffer in buffers.items():
        if _is_new(buffer, group, name):
            record = group.buffers.mirror(buffer, f"{path}.{name}".lstrip("."), module)
            if isinstance(buffers, ReplicaDict) and name in buffers.aggregations:
                record.aggregation = buffers.aggregations[name]
    states = {} if is_metric(module) else attributes  # see [Note: Metrics]
    for name, value in states.items():
        is_state = _is_plain_state(value, group) and not is_own(module, name)
        if is_state and _is_new(value, group, name):
            group.buffers.mirror(value, f"{path}.{name}".lstrip("."), module)
    if isinstance(module, nn.SyncBatchNorm):
        watch_torchs_own()
    if group.num_replicas > 1:
        for key, kind in (
            ("_parameters", OpaqueDict if renormalizes(module) else ReplicaDict),
            ("_buffers", ReplicaDict),
            ("_modules", WatchedDict),
        ):
            entries = attributes[key]
            if not isinstance(entries, kind) or entries.module() is not module:
                attributes[key] = kind(dict(entries.items()), module, group)
    group.recorded.look_again(module)
    route_call(module, group)


def route_call(module: nn.Module, group: ReplicaGroup) -> None:
    """Routes ``module(...)`` through the group."""
    call = module.__dict__.get("_compiled_call_impl")
    if not group.routes_calls or isinstance(call, TransparentCall):
        return
    if isinstance(module, torch.jit.ScriptModule):  # its forward is not Python
        return
    if call is not None or is_compiled(module):
        refuse_unknown_compiler()
    if call is None:
        routed = TransparentCall(module, group)
    else:
        routed = CompiledCall(module, group, call)
    module.__dict__["_compiled_call_impl"] = routed
    watch_compile(route_call)
    watch_wrappers()
    watch_attributes()
    if is_metric(module):
        watch_metric(module)


def _is_plain_state(value: Any, group: ReplicaGroup) -> bool:
    """Whether an attribute is a plain tensor that the replicas must not share."""
    if type(value) is not torch.Tensor or value.requires_grad:
        return False
    return value.device.type == group.devices[0].type


def _is_new(tensor: Any, group: ReplicaGroup, name: str) -> bool:
    if tensor is None or is_lazy(tensor) or is_unmade(tensor):
        return False
    if isinstance(tensor, MirroredTensor):
        if tensor._mirrored.replicas is not group.replicas:  # type: ignore[attr-defined]
            raise StrategyError(
                f"{name!r} is mirrored by another strategy; a variable belongs to one strategy: "
                "mirror a copy.deepcopy of the module"
            )
        return False
    return not group.owns(tensor)
