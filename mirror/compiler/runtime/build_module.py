"""ModuleProgramBuilder: traces calls of modules, and makes their guards and programs."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mirror.base.torch_private import hooks_of, post_accumulate_hooks_of
from mirror.compiler.capture.call_record import CallRecord
from mirror.compiler.capture.functional_graph import functional
from mirror.compiler.capture.observed_call import ObservedCall
from mirror.compiler.capture.side_effects import line_about
from mirror.compiler.capture.write_rewriting import UNDECLARED, draws_into_gaps
from mirror.compiler.lowering.module_trace import FAST_PATHS, CallPattern, trace_module
from mirror.compiler.lowering.pass_cutter import cut_passes
from mirror.compiler.lowering.programs import interpret_piece
from mirror.compiler.runtime.backward_values import BackwardValues
from mirror.compiler.runtime.module_graphs import PackedMemory, ReplicaPool
from mirror.compiler.runtime.module_program import ModuleProgram
from mirror.compiler.runtime.trace_guards import (
    GuardedValue,
    TraceGuards,
    guard_code,
    guard_layouts,
)
from mirror.compiler.step_inputs import InputKind, StateTensor, state_tensors
from mirror.device.cuda_graph import has_graphs
from mirror.errors import CompileError
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica, current
from mirror.replica.gradients.grad_reducer import GradReducer
from mirror.replica.modules.module_owner import suspend_recording
from mirror.replica.modules.replica_attributes import own_attributes
from mirror.replica.params.replicated_params import MirroredTensors
from mirror.replica.params.torch_function import MirroredParameter
from mirror.values import leaves_of, map_structure

_STATE = InputKind.PARAMETER, InputKind.BUFFER


class ModuleProgramBuilder:
    """Builds the programs of one strategy's modules."""

    def __init__(
        self, replicas: Replicas, registry: MirroredTensors, gradients: GradReducer
    ) -> None:
        self._replicas, self._registry, self._gradients = replicas, registry, gradients
        self._devices = tuple(dict.fromkeys(replicas.devices))
        self._pools: dict[int, list[ReplicaPool]] = {
            r: [] for r, device in enumerate(replicas.devices) if has_graphs(device)
        }
        self._packed: weakref.WeakKeyDictionary[nn.Module, dict[Any, PackedMemory | None]] = (
            weakref.WeakKeyDictionary()
        )

    def pattern(self, tree: Any, is_training: bool) -> CallPattern:
        """Returns the pattern of a call, in the calling thread's modes."""
        kinds = ["cpu", *(["cuda"] if torch.accelerator.is_available() else [])]
        autocast = {k: torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)}
        return CallPattern(
            map_structure(_without_memory, tree),
            [leaf.device.type for leaf in leaves_of(tree) if isinstance(leaf, Tensor)],
            is_training,
            torch.is_grad_enabled(),
            autocast,
            torch.is_autocast_cache_enabled(),
            _num_examples(current.replica),
        )

    def can_observe(self) -> bool:
        """Whether calls can be observed now."""
        return ObservedCall.is_possible()

    def observe(self) -> ObservedCall:
        """Returns what observes the first call, for the pattern."""
        return ObservedCall()

    def values_of(self, module: nn.Module, observed: ObservedCall) -> TraceGuards:
        """Returns guards of the values that an observed call has left, for its trace.

        If they hold, the trace runs the code that the call has run.
        """
        layers = observed.layers_of(module)
        functions = [module.forward, *observed.functions_of(layers)]
        around = observed.surroundings(functions, layers)
        own, parameters = _guard_own_attributes(layers), _guard_kinds(list(module.parameters()))
        return TraceGuards([*guard_code(layers, around), own, parameters])

    def record(self, module: nn.Module) -> CallRecord | None:
        """Returns what notes the functions that a call makes; see [Note: The same way].

        ``None``: under any mode of torch the call would not use its fused kernels.
        """
        layers = module.modules()
        if any(isinstance(layer, FAST_PATHS) and not layer.training for layer in layers):
            return None
        return CallRecord()

    def build(
        self, module: nn.Module, pattern: CallPattern, redo: Any
    ) -> tuple[TraceGuards, ModuleProgram]:
        """Returns the guards and the program of a call.

        Raises:
            CompileError: it cannot be traced.
        """
        with suspend_recording(), torch.inference_mode(False):
            return self._build(module, pattern, redo)

    def _build(
        self, module: nn.Module, pattern: CallPattern, redo: Any
    ) -> tuple[TraceGuards, ModuleProgram]:
        replicas, device = self._replicas, self._replicas.devices[0]
        assert pattern.observed is not None
        for parameter in module.parameters():
            if not (isinstance(parameter, nn.Parameter) and self._registry.owns(parameter)):
                raise CompileError("a parameter is none of the strategy's, as in functional_call")
        layers = pattern.observed.layers_of(module)
        functions = [module.forward, *pattern.observed.functions(layers)]
        pattern.observed.check(functions, layers)
        around = pattern.observed.surroundings(functions, layers)
        names = {name for code in around.codes for name in (*code.co_names, *code.co_consts)}
        for path, parameter in module.named_parameters():
            if type(parameter) not in (nn.Parameter, MirroredParameter):
                kind = type(parameter).__name__
                raise CompileError(f"parameter {path!r} is a {kind}, which no trace follows")
            if read := sorted(vars(parameter).keys() & names):
                line = line_about(around.codes, read)
                raise CompileError(f"{line}: it reads attribute {read[0]!r} of parameter {path!r}")
        if own := _own_attributes(layers):
            line = line_about(around.codes, [name for _, name in own])
            raise CompileError(
                f"{line}: attribute {own[0][1]!r} of {own[0][0]} is set in forward, and each "
                "replica has a value of its own"
            )
        leaves = _with_memory(leaves_of(pattern.tree), pattern.kinds, device)
        places = state_tensors(self._registry)
        num_codes = len(pattern.observed.codes)
        trace = trace_module(module, pattern, leaves, replicas, places, around)
        if len(pattern.observed.codes) > num_codes:  # the backward pass has run other functions
            return self._build(module, pattern, redo)
        later = pattern.observed.of_backward(functions, layers)
        step = trace.step
        for node in step.graph.graph.nodes:
            if draws_into_gaps(node):
                raise CompileError(f"{node.target} draws numbers into a tensor with gaps")
        pure = functional(
            step.graph, step.inputs, step.mode, for_inductor=False, keeps_kernels=True
        )
        for node in pure.module.graph.nodes:
            if str(node.target).startswith(UNDECLARED):
                raise CompileError(f"{node.target} writes statistics that no trace sees")
            # A kernel may lay out its result in another way than a trace thinks.
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        tangents = {i for i, one in enumerate(step.inputs) if one.kind is InputKind.PART}
        passes = cut_passes(pure, pure.num_results - len(trace.gradients), tangents)
        forward, backward = [
            None if piece is None else interpret_piece(piece, step.device, self._devices)
            for piece in (passes.forward, passes.backward)
        ]
        assert forward is not None
        program = ModuleProgram(
            replicas,
            trace,
            passes,
            forward,
            backward,
            self._pools,
            redo,
            self._gradients if replicas.mirrors else None,
            self._packed.setdefault(module, {}),
            None if later is None else BackwardValues(later),
        )
        used = [one.of for one in step.inputs if one.kind in _STATE]
        partial = [] if replicas.mirrors else trace.of_some_outputs
        with pattern.in_its_modes():
            guards = TraceGuards(
                [
                    *guard_code(step.modules, around),
                    guard_layouts(used),
                    _guard_own_attributes(layers),
                    _guard_modes(pattern.observed.modes()),
                    *([_guard_hooks(partial)] if partial else []),
                ]
            )
        return guards, program


def _num_examples(replica: Replica | None) -> float | None:
    """Returns the number of examples of the replica that runs; ``None`` if it is not known."""
    if replica is None:
        return None
    if replica.run.is_split:
        return replica.weight
    counts = replica.run.counts
    return None if counts is None else counts[replica.replica_id]


def _own_attributes(modules: Sequence[nn.Module]) -> list[tuple[str, str]]:
    """Returns the attributes that replicas have set; no guard reads the replicas' values."""
    return [
        (type(module).__name__, name)
        for module in modules
        for name, values in own_attributes(module).items()
        if values.is_set
    ]


def _guard_own_attributes(modules: Sequence[nn.Module]) -> GuardedValue:
    known = [own_attributes(module) for module in modules]
    names = ["an attribute that replicas have set"]
    return GuardedValue(names, lambda: _own_attributes(modules), lambda: not any(known))


def _guard_hooks(parameters: Sequence[StateTensor]) -> GuardedValue:
    """Returns the guard of hooks that autograd would call in passes through other outputs.

    Raises:
        CompileError: there are some.
    """
    owners = [parameter.owner for parameter in parameters]

    def have_none() -> bool:
        return not (any(map(hooks_of, owners)) or any(map(post_accumulate_hooks_of, owners)))

    if not have_none():
        hooks = zip(map(hooks_of, owners), map(post_accumulate_hooks_of, owners), strict=True)
        name = next(p.name for p, found in zip(parameters, hooks, strict=True) if any(found))
        raise CompileError(f"parameter {name!r} has a hook, and only some outputs depend on it")
    names = ["whether a parameter has no hook on which only some outputs depend"]
    return GuardedValue(names, lambda: [have_none()], have_none)


def _guard_kinds(parameters: Sequence[Tensor]) -> GuardedValue:
    read_kind, strides = operator.attrgetter("requires_grad", "dtype", "shape"), Tensor.stride
    names = ["requires_grad, dtype, shape or strides of a parameter"] * (2 * len(parameters))
    return GuardedValue(names, lambda: [*map(read_kind, parameters), *map(strides, parameters)])


def _guard_modes(modes: dict[Callable[[], Any], Any]) -> GuardedValue:
    """Guards the modes of torch that the code has asked for."""
    names = [f"torch's {getter.__name__}()" for getter in modes]
    return GuardedValue(names, lambda: [getter() for getter in modes])


def _without_memory(leaf: Any) -> Any:
    """Returns a placeholder of a tensor, and any other leaf itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(
        leaf.shape,
        leaf.stride(),
        dtype=leaf.dtype,
        device="meta",
        requires_grad=leaf.requires_grad,
    )


def _with_memory(leaves: Sequence[Any], kinds: Sequence[str], device: torch.device) -> list[Any]:
    """Returns leaves whose tensors are on the first replica's device, or on the host."""
    remaining = iter(kinds)
    return [
        torch.empty_strided(
            leaf.shape,
            leaf.stride(),
            dtype=leaf.dtype,
            device=device if next(remaining) == device.type else "cpu",
        )
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]
