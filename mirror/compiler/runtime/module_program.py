"""ModuleProgram: a traced call of a module, run on each replica between code that is not traced.

    in the trace                  in a call on replica r
    parameters                    the leaves of replica r, behind one autograd Function
    arguments with a gradient     inputs of that Function
    buffers                       the copies of r, which the forward program writes
    gradients of the outputs      what the Function's backward gets
    what forward saves            saved tensors of autograd: it checks that nothing writes them

So the gradients of parameters arrive where those of an uncompiled call do, and their hooks, the
buckets and ``no_sync`` see no difference. With CUDA graphs the parameters are inputs of a second
Function, which is called once, and whose output is an input of every call: ``_Leaves``. And a
backward pass that reaches nothing else leaves the gradients where they are reduced:
``packed_grads.py``.

A backward pass that is not the traced one calls ``forward`` again, uncompiled, with the state of
then: where other outputs have gradients, with ``create_graph=True``, where a hook reads a value
that has changed since, and on a GPU where a later call has overwritten what the graph has saved:
see ``module_graphs.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mirror.base.torch_private import set_sequence_number, storage_key
from mirror.compiler.call_outputs import distinct_tensors, output_leaves, rebuild_outputs
from mirror.compiler.lowering.module_trace import ModuleTrace
from mirror.compiler.lowering.pass_cutter import PassPrograms
from mirror.compiler.lowering.programs import CallableProgram, slot_getter
from mirror.compiler.runtime.backward_values import BackwardValues
from mirror.compiler.runtime.cuda_graphs import copies_of
from mirror.compiler.runtime.module_graphs import ModuleGraphs, PackedMemory, ReplicaPool
from mirror.compiler.step_inputs import InputKind, StateTensor
from mirror.errors import CompileError
from mirror.execution.replicas import Replicas
from mirror.replica.exactness.node_rules import Term
from mirror.replica.gradients.grad_reducer import GradReducer
from mirror.replica.gradients.packed_grads import PackedGrads
from mirror.replica.params.torch_function import make_common
from mirror.values import are_identical, leaves_of

_FIRST = 2**62  # as a number of a node: it runs as soon as it has its gradient
_version_of, _data_of = attrgetter("_version"), attrgetter("data")
_FILLED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.SHARED, InputKind.PART)
Redo = Callable[[int, "ModuleCall", Sequence[Any], bool], Sequence[Any]]


class ModuleProgram:
    """The programs of one traced call.

    Args:
        trace: the trace.
        passes: its programs as pieces.
        forward, backward: the same, ready to be called.
        pools: the memory of each replica's CUDA graphs; empty: there are none.
        redo: computes the gradients of a call by another call of ``forward``.
        gradients: those of the strategy's parameters; ``None`` with one replica.
        packed: where the module's programs leave gradients, by their parameters.
        later: the values that code of the backward pass reads.

    Attributes:
        pattern: the traced call.
        record: the functions of torch that it has made in the trace.
        tangents: by output with a gradient, the strides of that.
        not_differentiable: the numbers of the outputs that require no gradient.
        draws: whether a call draws random numbers.
    """

    def __init__(
        self,
        replicas: Replicas,
        trace: ModuleTrace,
        passes: PassPrograms,
        forward: CallableProgram,
        backward: CallableProgram | None,
        pools: Mapping[int, list[ReplicaPool]],
        redo: Redo,
        gradients: GradReducer | None,
        packed: dict[Any, PackedMemory | None],
        later: BackwardValues | None = None,
    ) -> None:
        self._known_packed = packed
        self._replicas, self._trace, self.passes, self._redo = replicas, trace, passes, redo
        self.pattern, self.record, self.later = trace.pattern, trace.record, later
        self._forward, self._backward = forward, backward
        inputs = trace.step.inputs
        read = {*forward.reads, *passes.saved, *passes.gradients, *passes.outputs}
        read = {slot for slot in read if slot < len(inputs)}
        for slot in read:
            if inputs[slot].kind not in _FILLED:
                raise CompileError(f"it uses the replica's {inputs[slot].kind.value}")
        for slot in passes.written:
            if inputs[slot].kind is not InputKind.BUFFER:
                kind = inputs[slot].kind
                raise CompileError(
                    f"it writes a parameter, {inputs[slot].of.name!r}"
                    if kind is InputKind.PARAMETER
                    else "it writes an argument, or a tensor that is no buffer"
                )
        self._state = [
            (slot, inputs[slot].of)
            for slot in sorted(read)
            if inputs[slot].kind in (InputKind.PARAMETER, InputKind.BUFFER)
        ]
        leaves = leaves_of(trace.pattern.tree)
        tensor_leaves = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._arguments = [
            (slot, tensor_leaves.index(inputs[slot].of))
            for slot in sorted(read)
            if inputs[slot].kind is InputKind.SHARED and inputs[slot].value is None
        ]
        others = [(slot, inputs[slot].value) for slot in sorted(read)]
        self._found = [(slot, value) for slot, value in others if value is not None]
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        if pools:
            for slot, value in self._found:
                _check_host_value(slot, value, passes)
        by_tangent = {
            one.of[1]: slot for slot, one in enumerate(inputs) if one.kind is InputKind.PART
        }
        self.tangents = trace.tangents
        self._get_arguments = slot_getter([*trace.arguments])
        self._tangent_slots = [by_tangent[i] for i in self.tangents]
        self._get_tangents = slot_getter([*self.tangents])
        self._strides = [*self.tangents.values()]
        self._num_arguments = len(trace.arguments)
        self._outputs = slot_getter(passes.outputs)
        self._saved = slot_getter(passes.saved)
        self._gradients = slot_getter(passes.gradients)
        num_leaves = len(trace.arguments) + len(trace.parameters)
        self._gaps: list[int] = []  # leaves on which only outputs without gradients depend
        if len(trace.gradients) < num_leaves:
            self._gaps = [i for i in range(num_leaves) if i not in trace.gradients]
        self._is_single = isinstance(trace.outputs, Tensor)
        found = output_leaves(trace.outputs)
        leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in found]
        self._structure = rebuild_outputs(trace.outputs, leaves)
        self._leaves = [
            [device if leaf == trace.step.device else leaf for leaf in leaves]
            for device in replicas.devices
        ]
        distinct, self._numbers = distinct_tensors(trace.outputs)
        num_outputs = self._num_outputs = len(distinct)
        self._are_tangents = [i in self.tangents for i in range(num_outputs)]
        self.not_differentiable = [i for i in range(num_outputs) if i not in trace.differentiable]
        self._has_parts = len({*trace.parts}) > 1
        self.draws = trace.step.draws > 0
        # Until a backward pass is the traced one, forward can be called again.
        self._is_proven = backward is None or not passes.reads_written
        self._statistics = sorted(passes.statistics)
        self._get_statistics = slot_getter(self._statistics)
        self._aliases: dict[int, tuple[Sequence[Tensor], list[Tensor]]] = {}
        self._are_inputs = [slot < len(inputs) for slot in passes.saved]
        stay = [
            slot
            for slot, one in enumerate(inputs)
            if one.kind in (InputKind.PARAMETER, InputKind.BUFFER) or one.value is not None
        ]
        self._packed = self._make_packed(gradients) if pools else None
        self._graphs = {
            r: ModuleGraphs(
                (r, replicas.devices[r]),
                passes,
                forward,
                backward,
                stay,
                self._num_arguments,
                self._packed,
                mine,
            )
            for r, mine in pools.items()
        }
        self._joined = {r: _JoinedLeaves(self._leaves_of(r)) for r in pools}

    def _make_packed(self, gradients: GradReducer | None) -> PackedMemory | None:
        """Returns where gradients are reduced; ``None`` if they cannot be left there."""
        if self._gaps:
            return None
        slots = self.passes.gradients[self._num_arguments :]
        variables = [place.record for place in self._trace.parameters]
        if gradients is None or self._backward is None or not slots or None in variables:
            return None
        if not set(slots).issubset(self._backward.gives):
            return None
        if not set(slots).isdisjoint(self.passes.gradients[: self._num_arguments]):
            return None
        key = tuple(variables)
        if key not in self._known_packed:
            grads = gradients.pack(variables)
            self._known_packed[key] = (
                None if grads is None else PackedMemory(gradients.tracker, grads, variables)
            )
        return self._known_packed[key]

    def call(self, replica_id: int, leaves: Sequence[Any], state: Any) -> Any:
        """Makes the call on a replica; returns what the module returns.

        Args:
            leaves: the tensors among the arguments.
            state: what ``redo`` needs to make the call again.
        """
        joined = self._joined.get(replica_id)
        parameters = self._leaves_of(replica_id) if joined is None else joined.parameters
        call = ModuleCall(self, replica_id, leaves, parameters, state)
        if self._backward is not None or self._trace.parameters or self._trace.arguments:
            wanted = self._get_arguments(leaves)
            if joined is not None and parameters and joined.is_free():
                joined.begin(call)
                outputs = _apply(call, *wanted, joined.output)
            else:
                outputs = _apply(call, *wanted, *parameters)
        else:
            with torch.no_grad():
                outputs, _ = self.run_forward(call)
        if self._is_single:
            return outputs[0]
        known = zip(self._numbers, self._leaves[replica_id], strict=True)
        return rebuild_outputs(
            self._structure, [leaf if i is None else outputs[i] for i, leaf in known]
        )

    def run_forward(self, call: ModuleCall) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Returns the outputs, and what backward reads."""
        r = call.replica_id
        device = self._replicas.devices[r]
        values: list[Any] = [None] * self.passes.num_slots
        for slot, place in self._state:
            values[slot] = place.owner if place.record is None else place.record.copies[r]
        if not self._is_proven:
            call.buffers = [tensor.clone() for tensor in self._written(r)]
        if self._statistics:
            aliases = self._without_versions(r, self._get_statistics(values))
            for slot, alias in zip(self._statistics, aliases, strict=True):
                values[slot] = alias
        for slot, number in self._arguments:
            values[slot] = call.leaves[number]
        for slot, found in self._found:
            values[slot] = found if found.device == device else self._copy_of(slot, r, found)
        graphs = self._graphs.get(r)
        saved: Sequence[Any]
        if graphs is not None and graphs.run_forward(call, values):
            call.graphs = graphs
            given = zip(self._saved(values), self._are_inputs, strict=True)
            saved = [value if is_input else None for value, is_input in given]
        else:
            self._forward.run(values, device)
            saved = self._saved(values)
        outputs = list(self._outputs(values))
        if self._trace.terms is not None:
            call.terms = partial(self._trace.terms.of_call, outputs[self._num_outputs :])
            del outputs[self._num_outputs :]
        # Autograd refuses writes to a view that a Function returns. It need not where the
        # backward pass does not read the memory.
        views = [i for i, output in enumerate(outputs) if output._base is not None]
        if views:
            keys = [None if value is None else storage_key(value) for value in saved]
            for i in views:
                if storage_key(outputs[i]) not in keys:
                    outputs[i] = outputs[i].data
        return outputs, saved

    def _copy_of(self, slot: int, replica_id: int, found: Tensor) -> Tensor:
        """Returns a replica's copy of a tensor on another device, with the values of now."""
        known = self._copies.get((slot, replica_id))
        if known is None:
            copy = found.detach().to(self._replicas.devices[replica_id])
            self._copies[slot, replica_id] = copy, found.detach().clone()
            return copy
        copy, before = known
        if found.device.type != "cpu" or not torch.equal(found, before):  # the host waits
            copy.copy_(found)
            before.copy_(found)
        return copy

    def _without_versions(self, replica_id: int, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors of buffers' memory, whose writes are no new versions of the buffers."""
        known = self._aliases.get(replica_id)
        if known is not None and are_identical(known[0], buffers):
            if [*map(Tensor.data_ptr, known[1])] == [*map(Tensor.data_ptr, buffers)]:
                return known[1]
        known = self._aliases[replica_id] = buffers, [buffer.data for buffer in buffers]
        return known[1]

    def run_backward(
        self, call: ModuleCall, saved: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Sequence[Any] | None:
        """Returns the gradients of the arguments and parameters.

        ``None``: they cannot be computed from what forward has saved.
        """
        r = call.replica_id
        values: list[Any] = [None] * self.passes.num_slots
        for slot, value in zip(self.passes.saved, saved, strict=True):
            values[slot] = value
        for slot, grad in zip(self._tangent_slots, grads, strict=True):
            values[slot] = grad
        if self._backward is None:
            return self._gradients(values)
        if call.graphs is not None:
            if call.graphs.run_backward(values):
                return self._leave(call, values)
            if self.draws:  # attention has kept its seed on the GPU
                return None
        self._backward.run(values, self._replicas.devices[r])
        if self._graphs:
            self._graphs[r].note_backward()
        return self._gradients(values)

    def _leave(self, call: ModuleCall, values: list[Any]) -> Sequence[Any]:
        """Returns the gradients that a graph has made; those of a packed pass stay in place."""
        found, packed = self._gradients(values), self._packed
        if packed is None:
            return found
        arguments = found[: self._num_arguments]
        if call.joined is not None and packed.is_under_way:
            return arguments
        return *arguments, *copies_of(packed.of_replica(call.replica_id))

    def backward(self, ctx: Any, call: ModuleCall, grads: Sequence[Tensor | None]) -> Any:
        """Returns the gradients for ``_Replayed``: of the traced pass, or of another one."""
        found = self._find_gradients(ctx, call, grads)
        joined = call.joined
        if joined is None:
            return found
        joined.node.gradients = found[self._num_arguments :] or None
        return *found[: self._num_arguments], joined.grad_of_output

    def _find_gradients(
        self, ctx: Any, call: ModuleCall, grads: Sequence[Tensor | None]
    ) -> Sequence[Any]:
        are_there = [grad is not None for grad in grads]
        if True not in are_there:  # of code behind another output
            return [None] * (self._num_arguments + len(self._trace.parameters))
        saved = self._take_saved(ctx, call, grads) if self._has_parts else ctx.saved_tensors
        given = self._get_tangents(grads)
        is_traced = (
            saved is not None
            and not torch.is_grad_enabled()
            and call.is_there()
            and are_there == self._are_tangents
            and [*map(Tensor.stride, given)] == self._strides
            and (self.later is None or self.later.hold())
        )
        found = None
        if is_traced:
            found = self.run_backward(call, saved, given)
        if found is None:
            call.check_leaves()
            found = self._redo(call.replica_id, call, grads, torch.is_grad_enabled())
        else:
            if self._gaps:
                found = list(found)
                for i in self._gaps:
                    found.insert(i, None)
            self._is_proven = call.has_ended = True  # the next call may overwrite what was saved
        packed = self._packed
        if packed is None or call.joined is None or not packed.is_under_way:
            return found
        # A packed pass does not go on to the parameters.
        of_parameters = found[self._num_arguments :]
        packed.arrive(call.replica_id, self._replicas.devices[call.replica_id], of_parameters)
        return found[: self._num_arguments]

    def _take_saved(self, ctx: Any, call: ModuleCall, grads: Sequence[Any]) -> Any:
        """Returns what forward has saved.

        ``None``: a pass through outputs with a graph of their own has freed it, which autograd
        does not do to others.
        """
        parts = {self._trace.parts[i] for i, grad in enumerate(grads) if grad is not None}
        try:
            return ctx.saved_tensors
        except RuntimeError:
            if not call.passed.isdisjoint(parts):
                raise
            call.is_freed = True
            return None
        finally:
            call.passed |= parts

    def check_redo(self, call: ModuleCall) -> None:
        """Raises CompileError if another call of ``forward`` would find other buffers."""
        if self.passes.reads_written and call.buffers is None:
            raise CompileError(
                "a backward pass is not the traced one, and forward, which would be called again, "
                "reads a buffer that it has changed; call strategy.compile after the first such "
                "pass, or leave it out"
            )

    @contextmanager
    def as_then(self, call: ModuleCall) -> Iterator[None]:
        """Within the block, forward finds what the call has found, and may write buffers.

        These then have their values again.
        """
        tensors = self._written(call.replica_id)
        after = [tensor.clone() for tensor in tensors]
        self._fill(tensors, call.buffers or ())
        try:
            with nullcontext() if self.later is None else self.later.of_then():
                yield
        finally:
            self._fill(tensors, after)

    def _written(self, replica_id: int) -> list[Tensor]:
        """Returns a replica's buffers that forward writes, of which no new version is made."""
        places = [self._trace.step.inputs[slot].of for slot in self.passes.written]
        return [_leaf_of(place, replica_id).data for place in places]

    @staticmethod
    def _fill(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for tensor, value in zip(tensors, values, strict=False):
            tensor.copy_(value)

    def packs(self, replica_id: int) -> tuple[int, PackedGrads | None]:
        """Returns the replica, and where a pass may leave its gradients packed."""
        return replica_id, None if self._packed is None else self._packed.grads

    def inputs_of(self, call: ModuleCall) -> tuple[list[int], list[Tensor]]:
        """Returns the numbers of the arguments that get gradients, and the parameters that do."""
        return self._trace.arguments, self._leaves_of(call.replica_id)

    def _leaves_of(self, r: int) -> list[Tensor]:
        """Returns the parameters that get gradients, as a replica's leaves of autograd."""
        places = self._trace.parameters
        return [p.owner if p.record is None else p.record.copies[r] for p in places]


class ModuleCall:
    """One call of a program on a replica, until its backward pass."""

    __slots__ = (
        *("__weakref__", "buffers", "graphs", "has_ended", "is_freed", "joined", "leaves"),
        *("passed", "program", "replica_id", "state", "terms", "versions", "watched"),
    )

    def __init__(
        self,
        program: ModuleProgram,
        replica_id: int,
        leaves: Sequence[Any],
        parameters: Sequence[Tensor],
        state: Any,
    ) -> None:
        self.program, self.replica_id = program, replica_id
        self.leaves, self.state = leaves, state
        self.graphs: ModuleGraphs | None = None
        self.joined: _JoinedLeaves | None = None
        self.buffers: list[Tensor] | None = None  # as forward has found them
        self.watched = (*leaves, *parameters)
        self.versions = [*map(_version_of, self.watched)]
        self.has_ended = self.is_freed = False
        self.terms: Callable[[int, float], list[Term] | None] | None = None  # of outputs
        self.passed: set[int] = set()

    def is_there(self) -> bool:
        """Whether what forward has saved is not overwritten."""
        return self.graphs is None or self.graphs.is_of(self)

    def check_leaves(self) -> None:
        """Raises RuntimeError, as autograd does, if forward would not find what it has found."""
        if [*map(_version_of, self.watched)] != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a parameter or an argument, between the call of a compiled "
                "module and a backward pass that calls forward again"
            )


class _JoinedLeaves:
    """The parameters of one replica as one input of a program's calls, one call after the other.

    Args:
        parameters: the replica's leaves that get gradients.

    Attributes:
        node: that of ``_Leaves``, through which a call's gradients go.
        output: its output.
        grad_of_output: the gradient of that, in every pass.
    """

    output: Tensor
    grad_of_output: Tensor

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.node: Any = None
        self._holder: Callable[[], ModuleCall | None] = lambda: None

    def is_free(self) -> bool:
        """Whether no call waits for its backward pass."""
        call = self._holder()
        return call is None or call.has_ended

    def begin(self, call: ModuleCall) -> None:
        """Has the gradients of a call go through the node."""
        if self.node is None:
            self.output = _join(*self.parameters)
            self.grad_of_output = self.output.detach()
            self.node = self.output.grad_fn
            set_sequence_number(self.node, _FIRST)
        call.joined = self
        self._holder = weakref.ref(call)


class _Leaves(torch.autograd.Function):
    """Joins the leaves of a replica in one tensor, which stands for them in all calls.

    A call sets ``gradients`` of its node before autograd gets there; ``None``: it has left them
    where they are reduced.
    """

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        make_common(ctx)
        ctx.gradients, ctx.num_leaves = None, len(leaves)
        ctx.mirror_is_separate = True
        ctx.set_materialize_grads(False)
        return torch.zeros((), device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return (None,) * ctx.num_leaves if gradients is None else tuple(gradients)


class _Replayed(torch.autograd.Function):
    """A call of a module on a replica, by its programs."""

    @staticmethod
    def forward(ctx: Any, call: ModuleCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        make_common(ctx)  # no code of a replica runs in backward, unless redo makes one current
        outputs, saved = call.program.run_forward(call)
        ctx.call, ctx.mirror_terms = call, call.terms
        if call.joined is not None:
            ctx.mirror_packs = partial(call.program.packs, call.replica_id)
        ctx.mirror_is_separate = call.program.pattern.is_separate
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        constant = call.program.not_differentiable
        if constant:
            ctx.mark_non_differentiable(*[outputs[i] for i in constant])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.call.program.backward(ctx, ctx.call, grads)


# Without the resolution of mirrored parameters and torch.func's transforms: there are none.
_apply: Any = super(torch.autograd.Function, _Replayed).apply
_join: Any = super(torch.autograd.Function, _Leaves).apply


def _leaf_of(place: StateTensor, replica_id: int) -> Tensor:
    found: Tensor = place.owner if place.record is None else place.record.copies[replica_id]
    return found


def _check_host_value(slot: int, value: Tensor, passes: PassPrograms) -> None:
    """Raises CompileError if a GPU would round another number than that of the host."""
    if value.device.type != "cpu" or value.dim() or not value.is_floating_point():
        return
    for piece in (passes.forward, passes.backward):
        if piece is None or slot not in piece.reads:
            continue
        assert piece.graph is not None
        holders = piece.graph.graph.find_nodes(op="placeholder")
        for user in holders[piece.reads.index(slot)].users:
            made = user.meta.get("val")
            if isinstance(made, Tensor) and made.dtype in (torch.float16, torch.bfloat16):
                raise CompileError(
                    f"it computes {made.dtype} with a number in a tensor of the host, which a "
                    "GPU's tensor would round; make it a Python number, or a buffer"
                )
