"""ModuleGraphs: a traced call of a module on one GPU, as a CUDA graph for each of its two passes.

    tensor                            in the graphs
    parameters, buffers               read in place; if one has got other memory, both are dropped
    arguments, gradients of outputs   copied into tensors of the graphs
    what forward saves                left where it is, from the forward to the backward graph
    outputs, gradients                copied out of the graphs

[Note: Memory of a module's graphs]
Problem: with memory of its own, each shape of a module would keep its activations between steps.
Rule: all graphs of a replica, those of other modules too, share a pool. After their capture only
arguments, outputs and gradients are held there as tensors. What forward saves is then memory of
the pool, which a launch of any other graph may overwrite.
Consequence: from a forward to its backward pass the pool is the call's. A call that begins
meanwhile runs without a graph. If it has no graph yet, it gets one in another pool: so several
modules, or several shapes in one step, have a pool each. The gradients of parameters lie where
the first graph of the pool has left them; others copy theirs there.

The first forward and backward pass load kernels, and run without graphs. A backward pass whose
forward was a graph is one, too: attention of torch keeps the seed of its dropout on the GPU in a
graph, and on the host outside.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.compiler.lowering.pass_cutter import PassPrograms
from mirror.compiler.lowering.programs import CallableProgram, SlotGetter, slot_getter
from mirror.compiler.runtime.cuda_graphs import CapturedGraph, alignment_of, copies_of
from mirror.compiler.step_errors import Uncapturable
from mirror.device.cuda_graph import CudaGraph, GraphPool
from mirror.errors import CompileError
from mirror.replica.gradients.grad_tracker import GradTracker
from mirror.replica.gradients.packed_grads import PackedGrads
from mirror.replica.params.replicated_param import ReplicatedParam

logger = logging.getLogger(__name__)

MAX_CAPTURES = 8  # of a call whose parameters get other memory
_MANY = 4  # calls with arguments of another alignment, which are worth a warning


class ReplicaPool:
    """Memory of some of a replica's graphs. See [Note: Memory of a module's graphs].

    Attributes:
        memory: the pool.
    """

    def __init__(self) -> None:
        self.memory = GraphPool()
        self._gradients: dict[Any, list[Tensor]] = {}
        self._holder: Callable[[], Any] = lambda: None

    def is_free(self) -> bool:
        """Whether no call waits for its backward pass."""
        call = self._holder()
        return call is None or call.has_ended

    def is_of(self, call: object) -> bool:
        """Whether its memory holds what this call has saved."""
        return self._holder() is call

    def begin(self, call: object) -> None:
        """Notes the call whose graph is launched."""
        self._holder = weakref.ref(call)

    def share(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns where graphs of this pool leave such gradients; called in a capture."""
        key = tuple((tuple(g.shape), g.stride(), g.dtype) for g in gradients)
        known = self._gradients.get(key)
        if known is None:
            known = self._gradients[key] = list(gradients)
        elif known:
            torch._foreach_copy_(known, list(gradients))
        return known

    def prepare(self) -> None:
        """Forgets the gradients of graphs that are gone."""
        if self.memory.is_empty:
            self._gradients.clear()


class PackedMemory:
    """Where the backward graphs of a program leave the gradients of parameters, to be reduced.

    Args:
        variables: the parameters, in the program's order.
    """

    def __init__(
        self, tracker: GradTracker, grads: PackedGrads, variables: Sequence[ReplicatedParam]
    ) -> None:
        self._tracker, self.grads = tracker, grads
        number_of = {variable: i for i, variable in enumerate(grads.variables)}
        self._numbers = [number_of[variable] for variable in variables]
        self._of_replica: dict[int, list[Tensor]] = {}

    @property
    def is_under_way(self) -> bool:
        """Whether the running pass leaves gradients here, and does not go on to parameters."""
        return self.grads.is_under_way

    def of_replica(self, replica_id: int) -> list[Tensor]:
        """Returns a replica's memory; not in a capture, whose pool would have it."""
        known = self._of_replica.get(replica_id)
        if known is None:
            made = self.grads.make(replica_id)
            known = self._of_replica[replica_id] = [made[number] for number in self._numbers]
        return known

    def arrive(
        self, replica_id: int, device: torch.device, gradients: Sequence[Tensor | None] = ()
    ) -> None:
        """Records that a replica's gradients are there.

        Args:
            gradients: those of the pass, if no graph has left them there; ``None``: of a parameter
                that the pass does not reach.
        """
        packed = self._tracker.packed
        if None in gradients:
            packed.leave_in_slots(self.grads, replica_id, device, self._numbers, gradients)
            return
        if gradients:
            torch._foreach_copy_(
                self.of_replica(replica_id), [g for g in gradients if g is not None]
            )
        packed.arrive(self.grads, replica_id, device)


class ModuleGraphs:
    """The graphs of one replica for a traced call.

    Args:
        place: the replica, and its device.
        passes: the call's programs as pieces.
        forward, backward: the same, ready to be called.
        static: the slots of inputs that are the same tensors in every call.
        num_arguments: how many of the first gradients are those of arguments.
        packed: where the parameters' gradients are reduced; ``None``: they are copied.
        pools: those of the replica, which this may extend.
    """

    def __init__(
        self,
        place: tuple[int, torch.device],
        passes: PassPrograms,
        forward: CallableProgram,
        backward: CallableProgram | None,
        static: Sequence[int],
        num_arguments: int,
        packed: PackedMemory | None,
        pools: list[ReplicaPool],
    ) -> None:
        (self._replica_id, self._device), self._pools, self._packed = place, pools, packed
        self._programs = forward, backward
        self._is_static = set(static).__contains__
        self._get_static = [_picker(p, self._is_static) for p in (forward, backward)]
        self._get_copied = _picker(forward, lambda slot: not self._is_static(slot))
        there = {*forward.reads, *forward.gives}
        # Gradients of outputs, and arguments that only the backward pass reads.
        self._tangents = [
            slot
            for slot in (() if backward is None else backward.reads)
            if slot not in there and not self._is_static(slot)
        ]
        self._get_tangents = slot_getter(self._tangents)
        self._outputs = [*dict.fromkeys(passes.outputs)]
        self._early = [slot for slot in forward.gives if slot in passes.gradients]
        self._of_arguments = set(passes.gradients[:num_arguments])
        self._of_parameters = passes.gradients[num_arguments:]
        self._gives: list[int] = []  # the slots of gradients in the pool's memory
        self._is_warm = False
        self._is_off = backward is None and bool(passes.gradients)  # the forward computes them
        self._num_captures = self._num_others = 0
        self._alignments: list[int] = []
        self._pool: ReplicaPool | None = None
        self._graphs: list[CapturedGraph] = []  # forward, and backward
        self._given: dict[int, Any] = {}

    def is_of(self, call: object) -> bool:
        """Whether the pool's memory holds what a call has saved."""
        return self._pool is not None and self._pool.is_of(call)

    def run_forward(self, call: Any, values: list[Any]) -> bool:
        """Makes a forward pass as a graph, and stores copies of its outputs in their slots.

        Returns:
            Whether it is made; if not, nothing has been done.
        """
        backward = self._programs[1]
        static = [*self._get_static[0](values)]
        if self._graphs and not self._graphs[0].is_valid(static, object()):
            self._drop()
        if not self._graphs:
            if self._is_off or not self._is_warm:
                self._is_warm |= backward is None
                return False
            if not self._capture_forward(static, values):
                return False
        pool, copied = self._pool, self._get_copied(values)
        assert pool is not None
        if not pool.is_free() or not self._are_aligned(copied):
            return False
        self._graphs[0].launch(copied)
        pool.begin(call)
        call.has_ended = backward is None
        copies = copies_of([self._given[slot] for slot in self._outputs])
        for slot, copy in zip(self._outputs, copies, strict=True):
            values[slot] = copy
        return True

    def run_backward(self, values: list[Any]) -> bool:
        """Makes the backward pass of the call that has the pool; stores copies of gradients.

        Those of parameters are in the packed memory instead, if there is one.

        Returns:
            Whether it is made; if not, the values that forward has saved are in their slots.
        """
        backward = self._programs[1]
        assert backward is not None
        if len(self._graphs) == 1 and not self._capture_backward(values):
            for slot, value in self._given.items():
                values[slot] = value
            self._drop()
            return False
        forward, graph = self._graphs
        is_valid = graph.is_valid([*self._get_static[1](values)], object())
        if not (is_valid and forward.is_in_place()):  # it may have saved views of parameters
            raise CompileError(
                "a parameter or buffer of a compiled module has got other memory between a "
                "forward and its backward pass; replace it before the forward pass"
            )
        graph.launch(self._get_tangents(values))
        made = dict(zip(self._gives, graph.outputs[0], strict=True))
        made |= {slot: self._given[slot] for slot in self._early}
        for slot, copy in zip(made, copies_of([*made.values()]), strict=True):
            values[slot] = copy
        return True

    def _are_aligned(self, arguments: Sequence[Tensor]) -> bool:
        """Whether arguments have the alignment of the capture; others are other kernels' work."""
        if [*map(alignment_of, arguments)] == self._alignments:
            return True
        self._num_others += 1
        if self._num_others == _MANY:
            self._warn("its arguments begin at other addresses; pass copies of them: x.clone()")
        return False

    def note_backward(self) -> None:
        """Notes that the backward program has run without a graph."""
        if not self._is_warm and self._packed is not None:
            self._packed.of_replica(self._replica_id)  # makes the memory: later passes are packed
        self._is_warm = True

    def _capture_forward(self, static: list[Tensor], values: list[Any]) -> bool:
        """Captures the forward program in a pool that no call has."""
        self._num_captures += 1
        if self._num_captures > MAX_CAPTURES:
            self._turn_off("its parameters or buffers get other memory again and again")
            return False
        pool = next((one for one in self._pools if one.is_free()), None)
        if pool is None:
            pool = ReplicaPool()
            self._pools.append(pool)
        pool.prepare()
        forward, backward = self._programs
        copied = self._get_copied(values)
        graph = CapturedGraph(CudaGraph(self._device, pool.memory), static)
        try:
            graph.capture(forward, self._device, copied, [False] * len(copied), self._is_static)
        except Uncapturable as error:
            self._turn_off(str(error), error.line)
            return False
        self._pool, self._graphs = pool, [graph]
        self._alignments = [*map(alignment_of, copied)]
        slots = [slot for slot in forward.reads if not self._is_static(slot)]
        self._given = dict(zip(slots, graph.copied_inputs, strict=True))
        self._given |= zip(forward.gives, graph.outputs[0], strict=True)
        if backward is None:
            self._let_go()
        return True

    def _capture_backward(self, values: list[Any]) -> bool:
        backward, pool = self._programs[1], self._pool
        assert backward is not None
        assert pool is not None
        static = [*self._get_static[1](values)]
        graph = CapturedGraph(CudaGraph(self._device, pool.memory), static)
        reads = [slot for slot in backward.reads if not self._is_static(slot)]
        are_in_place = [slot not in self._tangents for slot in reads]
        found = {**self._given, **{slot: values[slot] for slot in self._tangents}}

        memory = None if self._packed is None else self._packed.of_replica(self._replica_id)

        def finish(made: Sequence[Any]) -> Sequence[Any]:
            of_slot = dict(zip(backward.gives, made, strict=True))
            if memory is not None:
                torch._foreach_copy_(memory, [of_slot[slot] for slot in self._of_parameters])
                of_slot = {s: value for s, value in of_slot.items() if s in self._of_arguments}
            else:
                slots = dict.fromkeys(s for s in self._of_parameters if s in of_slot)
                dense = [slot for slot in slots if 0 not in of_slot[slot].stride()]
                shared = pool.share([of_slot[slot] for slot in dense])
                of_slot |= zip(dense, shared, strict=True)
            self._gives = [*of_slot]
            return [*of_slot.values()]

        try:
            graph.capture(
                backward,
                self._device,
                [found[slot] for slot in reads],
                are_in_place,
                self._is_static,
                finish=finish,
            )
        except Uncapturable as error:
            self._turn_off(str(error), error.line)
            return False
        graph.copied_inputs = [
            tensor
            for tensor, stays in zip(graph.copied_inputs, are_in_place, strict=True)
            if not stays
        ]
        self._graphs.append(graph)
        self._let_go()
        return True

    def _let_go(self) -> None:
        """Leaves to the pool what forward has saved: only graphs read it from now on."""
        assert self._pool is not None
        if not self._pool.memory.keeps_memory:
            return
        kept = {*self._outputs, *self._early}
        self._given = {slot: value for slot, value in self._given.items() if slot in kept}
        self._graphs[0].outputs = []

    def _drop(self) -> None:
        self._graphs, self._given, self._pool = [], {}, None

    def _turn_off(self, why: str, line: str = "") -> None:
        self._is_off = True
        self._warn(why, line)

    def _warn(self, why: str, line: str = "") -> None:
        logger.warning(
            "a compiled module launches kernels one by one, as an uncompiled one does: %s%s",
            line and f"{line}: ",
            why,
        )


def _picker(program: CallableProgram | None, is_wanted: Callable[[int], bool]) -> SlotGetter:
    return slot_getter([] if program is None else [s for s in program.reads if is_wanted(s)])
