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
then: where other outputs have gradients, with ``create_graph=True``, and on a GPU where a later
call has overwritten what the graph has saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mirror.base.torch_private import set_sequence_number, storage_key
from mirror.compiler.call_outputs import distinct_tensors, output_leaves, rebuild_outputs
from mirror.compiler.lowering.module_trace import ModuleTrace
from mirror.compiler.lowering.pass_cutter import PassPrograms
from mirror.compiler.lowering.programs import CallableProgram, SlotGetter, slot_getter
from mirror.compiler.lowering.step_plan import ProgramPiece
from mirror.compiler.runtime.cuda_graphs import CapturedPieces
from mirror.compiler.step_inputs import InputKind, StateTensor
from mirror.errors import CompileError
from mirror.execution.replicas import Replicas
from mirror.replica.gradients.grad_reducer import GradReducer
from mirror.replica.gradients.grad_tracker import GradTracker
from mirror.replica.gradients.packed_grads import PackedGrads
from mirror.replica.params.torch_function import make_common
from mirror.values import leaves_of

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
        make_graphs: makes the launcher of one replica's CUDA graphs, given the slots of inputs
            that stay; ``None``: torch's kernels are launched one by one.
        redo: computes the gradients of a call by another call of ``forward``.
        gradients: those of the strategy's parameters; ``None`` with one replica.

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
        make_graphs: Callable[[Sequence[int]], CapturedPieces] | None,
        redo: Redo,
        gradients: GradReducer | None,
    ) -> None:
        self._replicas, self._trace, self.passes, self._redo = replicas, trace, passes, redo
        self.pattern, self.record = trace.pattern, trace.record
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
        num_outputs = len(distinct)
        self._are_tangents = [i in self.tangents for i in range(num_outputs)]
        self.not_differentiable = [i for i in range(num_outputs) if i not in trace.differentiable]
        self._has_parts = len({*trace.parts}) > 1
        self.draws = trace.step.draws > 0
        # Until a backward pass is the traced one, forward can be called again.
        self._is_proven = backward is None or not passes.reads_written
        self._aliases: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._graphs: dict[int, _ReplicaGraphs] = {}
        stay = [
            slot
            for slot, one in enumerate(inputs)
            if one.kind in (InputKind.PARAMETER, InputKind.BUFFER) or one.value is not None
        ]
        if make_graphs is not None:
            packed = self._make_packed(gradients)
            self._graphs = {
                r: _ReplicaGraphs(make_graphs(stay), self._leaves_of(r), packed)
                for r in range(replicas.num_replicas)
            }

    def _make_packed(self, gradients: GradReducer | None) -> _PackedBackward | None:
        """Returns what leaves gradients where they are reduced; ``None`` if that cannot be."""
        if self._gaps:
            return None
        slots = self.passes.gradients[self._num_arguments :]
        variables = [place.record for place in self._trace.parameters]
        if gradients is None or self._backward is None or not slots or None in variables:
            return None
        if not set(slots).issubset(self._backward.gives):
            return None
        packed = gradients.pack(variables)
        if packed is None:
            return None
        others = [s for s in self.passes.gradients[: self._num_arguments] if s not in slots]
        return _PackedBackward(self._backward, gradients.tracker, packed, variables, slots, others)

    def call(self, replica_id: int, leaves: Sequence[Any], state: Any) -> Any:
        """Makes the call on a replica; returns what the module returns.

        Args:
            leaves: the tensors among the arguments.
            state: what ``redo`` needs to make the call again.
        """
        graphs = self._graphs.get(replica_id)
        parameters = self._leaves_of(replica_id) if graphs is None else graphs.parameters
        call = ModuleCall(self, replica_id, leaves, parameters, state)
        if self._backward is not None or self._trace.parameters or self._trace.arguments:
            wanted = self._get_arguments(leaves)
            if graphs is not None and parameters and graphs.are_free():
                call.leaves_node = graphs.join_leaves()
                outputs = _apply(call, *wanted, graphs.joined)
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
        for slot in self.passes.statistics:
            values[slot] = self._without_version(slot, r, values[slot])
        for slot, number in self._arguments:
            values[slot] = call.leaves[number]
        for slot, found in self._found:
            values[slot] = found.to(device)
        graphs = self._graphs.get(r)
        if graphs is not None and graphs.are_free():
            graphs.pieces.moves = object()  # any tensor may have got other memory
            graphs.pieces.run(self._forward, {r: values})
            graphs.begin(call)
            outputs = graphs.pieces.keep(self._outputs(values))
        else:
            self._forward.run(values, device)
            outputs = list(self._outputs(values))
        saved = self._saved(values)
        # Autograd refuses writes to a view that a Function returns. It need not where the
        # backward pass does not read the memory.
        for i, output in enumerate(outputs):
            if output._base is not None and storage_key(output) not in map(storage_key, saved):
                outputs[i] = output.data
        return outputs, saved

    def _without_version(self, slot: int, replica_id: int, buffer: Tensor) -> Tensor:
        """Returns a tensor of a buffer's memory, whose writes are no new version of the buffer."""
        known = self._aliases.get((slot, replica_id))
        if known is None or known[0] is not buffer or known[1].data_ptr() != buffer.data_ptr():
            known = self._aliases[slot, replica_id] = buffer, buffer.data
        return known[1]

    def run_backward(
        self, call: ModuleCall, saved: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Sequence[Any]:
        """Returns the gradients of the arguments and parameters."""
        r = call.replica_id
        device = self._replicas.devices[r]
        values: list[Any] = [None] * self.passes.num_slots
        for slot, value in zip(self.passes.saved, saved, strict=True):
            values[slot] = value
        for slot, grad in zip(self._tangent_slots, grads, strict=True):
            values[slot] = grad
        graphs = self._graphs.get(r)
        if self._backward is None:
            return self._gradients(values)
        if graphs is not None and graphs.is_of(call):
            graphs.pieces.moves = object()
            if graphs.packed is not None:
                return graphs.packed.run(graphs.pieces, self._gradients, values, r, device)
            graphs.pieces.run(self._backward, {r: values})
            return graphs.pieces.keep(self._gradients(values))
        self._backward.run(values, device)
        return self._gradients(values)

    def backward(self, ctx: Any, call: ModuleCall, grads: Sequence[Tensor | None]) -> Any:
        """Returns the gradients for ``_Replayed``: of the traced pass, or of another one."""
        found = self._find_gradients(ctx, call, grads)
        node = call.leaves_node
        if node is None:
            return found
        node.gradients = found[self._num_arguments :] or None
        return *found[: self._num_arguments], self._graphs[call.replica_id].grad_of_joined

    def _find_gradients(
        self, ctx: Any, call: ModuleCall, grads: Sequence[Tensor | None]
    ) -> Sequence[Any]:
        saved = self._take_saved(ctx, call, grads)
        given = self._get_tangents(grads)
        is_traced = (
            saved is not None
            and not torch.is_grad_enabled()
            and call.is_there()
            and [grad is not None for grad in grads] == self._are_tangents
            and [*map(Tensor.stride, given)] == self._strides
        )
        if not is_traced:
            call.check_leaves()
            return self._redo(call.replica_id, call, grads, torch.is_grad_enabled())
        found = self.run_backward(call, saved, given)
        if self._gaps:
            found = list(found)
            for i in self._gaps:
                found.insert(i, None)
        self._is_proven = call.has_ended = True  # the next call may overwrite what was saved
        return found

    def _take_saved(self, ctx: Any, call: ModuleCall, grads: Sequence[Any]) -> Any:
        """Returns what forward has saved.

        ``None``: a pass through outputs with a graph of their own has freed it, which autograd
        does not do to others.
        """
        if not self._has_parts:
            return ctx.saved_tensors
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
    def keeping_buffers(self, call: ModuleCall) -> Iterator[None]:
        """Within the block, forward may write buffers, which then have their values again."""
        tensors = self._written(call.replica_id)
        after = [tensor.clone() for tensor in tensors]
        self._fill(tensors, call.buffers or ())
        try:
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
        packed = self._graphs[replica_id].packed
        return replica_id, None if packed is None else packed.grads

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
        *("__weakref__", "buffers", "has_ended", "is_freed", "leaves", "leaves_node", "passed"),
        *("program", "replica_id", "state", "token", "versions", "watched"),
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
        self.token: _ReplicaGraphs | None = None
        self.leaves_node: Any = None
        self.buffers: list[Tensor] | None = None  # as forward has found them
        self.watched = (*leaves, *parameters)
        self.versions = [*map(_version_of, self.watched)]
        self.has_ended = self.is_freed = False
        self.passed: set[int] = set()

    def is_there(self) -> bool:
        """Whether what forward has saved is not overwritten."""
        return self.token is None or self.token.is_of(self)

    def check_leaves(self) -> None:
        """Raises RuntimeError, as autograd does, if forward would not find what it has found."""
        if [*map(_version_of, self.watched)] != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a parameter or an argument, between the call of a compiled "
                "module and a backward pass that calls forward again"
            )


class _ReplicaGraphs:
    """The CUDA graphs of one replica, whose memory holds what one call has saved.

    Args:
        parameters: the replica's leaves that get gradients.
        packed: leaves these where they are reduced; ``None`` if that cannot be.

    Attributes:
        joined: the output of ``_Leaves``.
        grad_of_joined: its gradient, in every pass.
    """

    joined: Tensor
    grad_of_joined: Tensor

    def __init__(
        self,
        pieces: CapturedPieces,
        parameters: list[Tensor],
        packed: _PackedBackward | None,
    ) -> None:
        self.pieces, self.parameters, self.packed = pieces, parameters, packed
        self._leaves_node: Any = None
        self._holder: weakref.ref[ModuleCall] | None = None

    def join_leaves(self) -> Any:
        """Returns the node of ``_Leaves``, through which a call's gradients go."""
        if self._leaves_node is None:
            self.joined = _join(*self.parameters)
            self.grad_of_joined = self.joined.detach()
            self._leaves_node = self.joined.grad_fn
            set_sequence_number(self._leaves_node, _FIRST)
        return self._leaves_node

    def are_free(self) -> bool:
        """Whether no call needs what the graphs have saved."""
        call = None if self._holder is None else self._holder()
        return call is None or call.has_ended

    def begin(self, call: ModuleCall) -> None:
        self._holder, call.token = weakref.ref(call), self

    def is_of(self, call: ModuleCall) -> bool:
        """Whether the graphs' memory holds what this call has saved."""
        return self._holder is not None and self._holder() is call


class _PackedBackward:
    """A backward program that writes the gradients of parameters where they are reduced.

    Args:
        program: it returns the gradients.
        variables: whose, in its order.
        slots: where it leaves these; ``others``: those of arguments.
    """

    def __init__(
        self,
        program: CallableProgram,
        tracker: GradTracker,
        grads: PackedGrads,
        variables: Sequence[Any],
        slots: Sequence[int],
        others: Sequence[int],
    ) -> None:
        self._program, self._tracker, self.grads = program, tracker, grads
        number_of = {variable: i for i, variable in enumerate(grads.variables)}
        self._numbers = [number_of[variable] for variable in variables]
        self._get_made = slot_getter([program.gives.index(slot) for slot in slots])
        self._others, self._slots = list(dict.fromkeys(others)), slots
        self._get_others = slot_getter([program.gives.index(slot) for slot in self._others])
        self._of_replica: dict[int, tuple[CallableProgram, list[Tensor]]] = {}

    def _make(self, replica_id: int, device: torch.device) -> tuple[CallableProgram, list[Tensor]]:
        """Returns the program of a replica, and the memory that it writes."""
        made = self.grads.make(replica_id)
        memory = [made[number] for number in self._numbers]
        call, get_made, get_others = (
            self._program.programs[device],
            self._get_made,
            self._get_others,
        )

        def call_packing(inputs: list[Any]) -> Sequence[Any]:
            found = call(inputs)
            torch._foreach_copy_(memory, list(get_made(found)))
            return get_others(found)

        piece = ProgramPiece(True, None, self._program.reads, self._others, [])
        return CallableProgram(piece, {device: call_packing}, is_raw=False), memory

    def run(
        self,
        pieces: CapturedPieces,
        get_gradients: SlotGetter,
        values: list[Any],
        replica_id: int,
        device: torch.device,
    ) -> Sequence[Any]:
        """Returns the gradients of arguments, and of parameters unless the pass is packed."""
        known = self._of_replica.get(replica_id)
        if known is None:
            known = self._of_replica[replica_id] = self._make(replica_id, device)
        program, memory = known
        pieces.run(program, {replica_id: values})
        if self.grads.is_under_way:
            self._tracker.packed.arrive(self.grads, replica_id, device)
            found = get_gradients(values)
            return pieces.keep(found[: len(found) - len(memory)])
        for slot, grad in zip(self._slots, memory, strict=True):
            values[slot] = grad
        found = get_gradients(values)
        num_arguments = len(found) - len(memory)
        copies = torch._foreach_mul(memory, 1.0)
        return *pieces.keep(found[:num_arguments]), *copies


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
        ctx.call = call
        if call.leaves_node is not None:
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
