"""ModuleRegistry: mirrors the modules of a strategy in place, and keeps them mirrored.

A module stays the object it is; ``type``, ``state_dict`` and ``parameters()`` do not change.
Plain tensors among its attributes become mirrored like buffers. Three of its dicts and one
instance attribute are replaced:

    _parameters, _buffers   ReplicaDict: reads the current replica's copy while one runs; with one
                            replica a WatchedDict
    _modules                WatchedDict: records a submodule that is added later
    _compiled_call_impl     CallInterceptor: splits the call in the cross-replica context.
                            ``Module.__call__`` calls it if set; copies and pickles have None.

When the first module is mirrored, these functions of torch are wrapped: ``compile``,
``__setattr__``, ``__delattr__`` and ``_apply`` of modules, and ``apply`` of custom functions. See
[Note: Compiled calls], [Note: Own attributes] and ``replica/params/torch_function.py``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mirror.base.dynamo import is_compiled_module, refuse_unknown_compiler
from mirror.base.torch_private import INFER, INITIALIZING, SPLIT_CALL, refuse_lacking
from mirror.device.device_mesh import disabling_remap
from mirror.devices import is_simulated
from mirror.errors import StrategyError
from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica
from mirror.execution.runner import Runner
from mirror.execution.swapped_state import stream_of_caller
from mirror.replica.layers.sync_batch_norm import wrap_torch_sync_batch_norm
from mirror.replica.layers.unsplit_layers import renormalizes, warn_of_frequencies
from mirror.replica.modules.conversions import (
    IGNORED,
    refuse_wrapper,
    warn_of_ignored,
    watch_conversions,
    watch_wrappers,
)
from mirror.replica.modules.flat_weights import watch_recurrent_layers
from mirror.replica.modules.metric_calls import (
    is_metric,
    unwatched_libraries,
    watch_log,
    watch_lone_metrics,
    watch_metric,
)
from mirror.replica.modules.module_owner import (
    Interceptor,
    OpaqueDict,
    PendingModules,
    ReplicaDict,
    WatchedDict,
    interceptor_of,
    is_uninitialized,
    owner_of,
    watch_compile,
)
from mirror.replica.modules.per_replica_values import ModuleAttributes
from mirror.replica.modules.replica_attributes import is_own, watch_attributes, watch_copies
from mirror.replica.modules.split_call import CallInterceptor
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_buffers import Buffers
from mirror.replica.params.replicated_params import MirroredTensors, ReplicatedParams
from mirror.replica.params.torch_function import watch_functions
from mirror.threads.merge_point import MergePoint


class LayerLibrary(NamedTuple):
    """A library whose layers are created and called in another way than torch's.

    Attributes:
        has_made: whether a module is a layer of the library; it does not import the library.
        interceptor: the class of these layers' interceptors.
        watch: makes a scope record the layers that are created inside; idempotent.
    """

    has_made: Callable[[nn.Module], bool]
    interceptor: type[CallInterceptor]
    watch: Callable[[], None]


layer_libraries: list[LayerLibrary] = []
"""The libraries that ``integrations/`` knows."""


class ModuleRegistry:
    """The modules of one strategy; the part "modules".

    Args:
        registry: the mirrored tensors.
        pending: the modules that are mirrored at the next use.
        variables, buffers: turn parameters and buffers into mirrored ones.
        attributes: the attributes that replicas set on modules.

    Attributes:
        overridden: the dicts in which a parameter was replaced inside ``run``.
        routes_calls: whether calls are split, or their arguments moved.
        verify: whether split calls are compared with one device. See ``verified_calls.py``.
        interceptor: makes the interceptors of modules.
    """

    def __init__(
        self,
        replicas: Replicas,
        runner: Runner,
        registry: MirroredTensors,
        pending: PendingModules,
        variables: ReplicatedParams,
        buffers: Buffers,
        attributes: ModuleAttributes,
        verify: str = "first",
    ) -> None:
        self.verify = verify
        self.replicas = replicas
        self.runner = runner
        self.attributes = attributes
        self.overridden: list[ReplicaDict] = []
        # A single simulated device needs neither moving of arguments nor splitting.
        self.routes_calls = replicas.mirrors or not is_simulated(replicas.devices)
        self.interceptor: Callable[..., CallInterceptor] = CallInterceptor
        self._registry = registry
        self.pending = pending
        self._variables = variables
        self._buffers = buffers
        self._mirrored: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def mirrored_modules(self) -> Iterator[tuple[nn.Module, str]]:
        """Yields the mirrored modules, in the order of their mirroring, with their first paths."""
        for key, (reference, path) in list(self._mirrored.items()):
            module = reference()
            if module is None:
                self._mirrored.pop(key, None)
            else:
                yield module, path

    def has(self, module: nn.Module) -> bool:
        """Whether a module itself is mirrored."""
        reference, _ = self._mirrored.get(id(module), (None, ""))
        return reference is not None and reference() is module

    def part(self) -> LifecycleHooks:
        """Returns the hooks of the modules. See [Note: Parts]."""
        return LifecycleHooks(
            name="modules",
            prepare=self.mirror_recorded,
            on_return=WhilePending(self.overridden, self._refuse_swaps),
            recover=self._drop_swaps,
        )

    def record(self, module: nn.Module) -> None:
        """Records a module to be mirrored at the next use."""
        if self.pending.add(module):
            self.route(module)

    def mirror_recorded(self) -> None:
        """Mirrors the modules created in the scope, or changed, since the last use."""
        # Checked here, because a call would cost every step.
        if unwatched_libraries and "torchmetrics" in sys.modules and self.replicas.mirrors:
            watch_lone_metrics()
        if self.pending.modules or self.pending.unmade:
            for module in self.pending.take():
                self.mirror(module)

    def mirror(self, module: nn.Module) -> None:
        """Mirrors a module and its submodules in place, except those that are mirrored already.

        With one replica, only moves it to the device.
        """
        self.replicas.timeline.use()  # one replica may never have a run
        if not self.replicas.mirrors:
            self._move(module)
            return
        watch_functions()
        watch_conversions()
        watch_recurrent_layers()
        # The mirrored tensors outlive the caller's inference mode.
        with torch.inference_mode(False):
            found = []
            for name, submodule in module.named_modules():
                if isinstance(submodule, torch.jit.ScriptModule):
                    self._refuse_script(submodule, name or type(module).__name__)
                    continue
                refuse_wrapper(submodule, name)
                if IGNORED in submodule.__dict__:
                    warn_of_ignored(submodule, submodule.__dict__[IGNORED])
                self._mirror_params(submodule, self._first_path(submodule, name))
                found.append((submodule, name))
            for submodule, name in found:  # a buffer may lie in a parameter's memory
                self.mirror_own(submodule, name)

    def _mirror_params(self, module: nn.Module, path: str) -> None:
        for name, parameter in module.__dict__["_parameters"].items():
            # torch.func.functional_call puts plain tensors there, for one call.
            if isinstance(parameter, nn.Parameter) and self._is_new(parameter, name):
                self._variables.mirror(parameter, f"{path}.{name}".lstrip("."))

    def mirror_own(self, module: nn.Module, path: str) -> None:
        """Mirrors the tensors of a module, without those of its submodules."""
        if self.replicas.num_replicas > 1:
            warn_of_frequencies(module)
        path = self._first_path(module, path)
        attributes = module.__dict__
        buffers = attributes["_buffers"]
        self._mirror_params(module, path)
        for name, buffer in buffers.items():
            if self._is_new(buffer, name):
                record = self._buffers.mirror(buffer, f"{path}.{name}".lstrip("."), module)
                if isinstance(buffers, ReplicaDict) and name in buffers.aggregations:
                    record.aggregation = buffers.aggregations[name]
        states = {} if is_metric(module) else attributes  # see [Note: Metrics]
        for name, value in states.items():
            is_state = self._is_plain_state(value) and not is_own(module, name)
            if is_state and self._is_new(value, name):
                self._buffers.mirror(value, f"{path}.{name}".lstrip("."), module)
        if isinstance(module, nn.SyncBatchNorm):
            wrap_torch_sync_batch_norm(owner_of)
        self._watch_dicts(module)
        self.pending.retry(module)
        self.route(module)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()

    def _first_path(self, module: nn.Module, path: str) -> str:
        """Returns the path where a module was found first."""
        known = self._mirrored.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        self._mirrored.pop(id(module), None)  # the id of a module that has been freed
        self._mirrored[id(module)] = weakref.ref(module), path
        return path

    def initialize(self, module: Any, replica: Replica | None, args: Any, kwargs: Any) -> None:
        """Initializes a lazy module when all replicas have called it, and mirrors it.

        The first replica's arguments and random stream determine the parameters.

        Args:
            replica: the calling replica; ``None`` outside ``run`` of the only one.

        Raises:
            DivergenceError: not all active replicas call it first.
        """
        if INITIALIZING not in module.__dict__:  # it has parameters, but kept its class
            return
        if replica is None:
            getattr(module, INFER)(module, args, kwargs)
            self._move(module)
            return
        name = type(module).__name__

        def action(payloads: dict[int, Any]) -> dict[int, None]:
            args, kwargs = payloads[min(payloads)]
            replica.run.swap_in_first()
            parallel_runs = self.runner.parallel_runs
            drawing = nullcontext() if parallel_runs is None else parallel_runs.drawing_in_merge()
            with stream_of_caller(self.replicas.workers), disabling_remap(), drawing:
                getattr(module, INFER)(module, args, kwargs)
                if not self.replicas.mirrors:
                    self._move(module)
                else:
                    self.mirror_own(module, type(module).__name__)
            return dict.fromkeys(payloads)

        what = f"the first call of a {name}"
        point = MergePoint(what, (name, id(module)), (args, kwargs), action)
        replica.run.merge(replica.replica_id, point)

    def route_compiled(self, module: nn.Module) -> Interceptor | None:
        """Returns the interceptor of a module whose calls are compiled, also with one replica.

        ``None`` if this strategy does not mirror the module.
        """
        self.mirror_recorded()
        unmade = {id(layer) for layer in module.modules()} & self.pending.unmade.keys()
        if unmade or all(map(self._registry.owns, module.parameters())):
            self.route(module, is_compiled_here=True)
        route = interceptor_of(module)
        return None if route is None or route.replicas is not self.replicas else route

    def route(self, module: nn.Module, *, is_compiled_here: bool = False) -> None:
        """Makes calls of a module split calls, if its replicas or this call need it."""
        if not (self.routes_calls or is_compiled_here) or interceptor_of(module) is not None:
            return
        if isinstance(module, torch.jit.ScriptModule):  # its forward is not Python
            return
        refuse_lacking(SPLIT_CALL)
        call = module.__dict__.get(SPLIT_CALL)
        if isinstance(call, CallInterceptor):
            call = None  # of a copied __dict__
        if call is not None or is_compiled_module(module):
            refuse_unknown_compiler()
        kinds = (library.interceptor for library in layer_libraries if library.has_made(module))
        module.__dict__[SPLIT_CALL] = next(kinds, self.interceptor)(module, self, call)
        watch_compile()
        watch_wrappers()
        watch_attributes()
        watch_copies()
        if is_metric(module):
            watch_metric(module)
        watch_log(module)

    def _move(self, module: nn.Module) -> None:
        """Moves a module to the only replica's device."""
        moved: set[Tensor] = set()
        for submodule in module.modules():
            if not isinstance(submodule, torch.jit.ScriptModule):
                self._watch_dicts(submodule)
            self.route(submodule)
            self.pending.retry(submodule)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not (self._registry.owns(tensor) or is_uninitialized(tensor)):
                home = self.replicas.mesh.home_of(tensor.device, name)
                if tensor.device != home:
                    tensor.data = tensor.data.to(home)
                    moved.add(tensor)
                self._registry.register(tensor)
        for submodule in module.modules():
            if isinstance(submodule, nn.RNNBase) and not moved.isdisjoint(submodule.parameters()):
                submodule.flatten_parameters()  # as .to(device) does

    def _refuse_script(self, module: torch.jit.ScriptModule, name: str) -> None:
        # A module that was traced from a mirrored one, inside the scope, shares its tensors.
        if not all(map(self._registry.owns, (*module.parameters(), *module.buffers()))):
            raise StrategyError(
                f"{name} is a ScriptModule: its variables live in C++; mirror the Python module "
                "it was made from"
            )

    def _watch_dicts(self, module: nn.Module) -> None:
        attributes = module.__dict__
        kinds: dict[str, Any] = dict.fromkeys(("_parameters", "_buffers", "_modules"), WatchedDict)
        if self.replicas.mirrors:
            opaque = renormalizes(module)
            kinds |= {
                "_parameters": OpaqueDict if opaque else ReplicaDict,
                "_buffers": ReplicaDict,
            }
        for key, kind in kinds.items():
            entries = attributes[key]
            if not isinstance(entries, kind) or entries.module() is not module:
                attributes[key] = kind(dict(entries.items()), module, self)

    def _is_plain_state(self, value: Any) -> bool:
        """Whether an attribute is a plain tensor that the replicas must not share."""
        if type(value) is not Tensor or value.requires_grad:
            return False
        return value.device.type == self.replicas.devices[0].type

    def _is_new(self, tensor: Any, name: str) -> bool:
        if tensor is None or is_uninitialized(tensor):
            return False
        if isinstance(tensor, MirroredTensor):
            if tensor._mirrored.replicas is not self.replicas:  # type: ignore[attr-defined]
                raise StrategyError(
                    f"{name!r} is mirrored by another strategy; a variable belongs to one "
                    "strategy: mirror a copy.deepcopy of the module"
                )
            return False
        return not self._registry.owns(tensor)

    def _refuse_swaps(self) -> None:
        while self.overridden:
            self.overridden.pop().refuse_swaps()

    def _drop_swaps(self) -> None:
        while self.overridden:
            self.overridden.pop().overrides.clear()
