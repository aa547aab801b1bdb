"""StepProgram: the programs of one trace of a step, run on all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mirror.base.timeline import CROSS, PROGRAMS, REDUCTION, SHARED_PROGRAMS
from mirror.compiler.capture.tracer import CollectivePoint
from mirror.compiler.free_variables import PLAIN
from mirror.compiler.lowering.programs import CallableProgram, SlotGetter, slot_getter
from mirror.compiler.lowering.step_plan import StepPlan
from mirror.compiler.lowering.step_trace import StepTrace, layout
from mirror.compiler.runtime.bindings import Bindings
from mirror.compiler.runtime.cuda_graphs import CapturedPieces
from mirror.compiler.runtime.parallel_launch import ParallelLaunch
from mirror.compiler.runtime.param_sync import ParamSync, StateChanges
from mirror.compiler.runtime.step_arguments import StepArguments
from mirror.compiler.runtime.step_reductions import StepReductions
from mirror.compiler.runtime.worker_consensus import CallShares, ProgramCollectives
from mirror.compiler.step_errors import ProgramFailed
from mirror.compiler.step_inputs import InputKind, StateTensor
from mirror.compiler.torch_internals import Sizes
from mirror.execution.replicas import Replicas
from mirror.execution.run import check_weight
from mirror.replica.collectives.collectives import all_reduce_payloads
from mirror.replica.collectives.over_workers import Participants
from mirror.values import ABSENT


class StepProgram:
    """A traced step on all replicas.

    Args:
        trace: what tracing has found: inputs, results, and collective points.
        plan: which programs run, and in which order. A level is what runs between two collective
            points, where all replicas must meet.
        levels: for each level of ``plan``, ready to be called: the program that runs once on every
            device, and the one that runs on every replica. ``None`` where a level has none.
        sizes: the sizes of arguments for which the programs are valid.
        leaves: one replica's leaves of the arguments in the trace; its tensors have no memory.
        structure: the structure of the arguments.
        bindings: finds the tensors of the trace's inputs.
        reductions: reduces local gradients.
        param_sync: the strategy's parameters, which a step changes as a write to replica 0 does.
        launcher: runs programs of all replicas.

    Attributes:
        collectives: the collective points.
        weights: by replica, the weights that the last call has set; ``None`` if it sets none.
    """

    def __init__(
        self,
        replicas: Replicas,
        trace: StepTrace,
        plan: StepPlan,
        levels: Sequence[tuple[CallableProgram | None, CallableProgram | None]],
        sizes: Sizes,
        leaves: list[Any],
        structure: Any,
        bindings: Bindings,
        reductions: StepReductions,
        param_sync: ParamSync,
        launcher: ParallelLaunch | CapturedPieces,
    ) -> None:
        self._replicas, self.trace, self.plan = replicas, trace, plan
        self._sizes, self._leaves, self.structure = sizes, leaves, structure
        self._param_sync, self._launcher = param_sync, launcher
        self._levels = [
            (
                *called,
                [
                    (n, slot_getter(slots), result_slots)
                    for n, slots, result_slots in level.collectives
                ],
            )
            for called, level in zip(levels, plan.levels, strict=True)
        ]
        self._bindings, self._reductions = bindings, reductions
        self._num_results = sum(trace.is_tensor)
        self._results = slot_getter(plan.results[: self._num_results + len(trace.argument_grads)])
        self._changes = _changes(trace, plan)
        self._grads = slot_getter(
            [plan.results[at] for at in trace.grads.values() if at is not None]
        )
        self.collectives = ProgramCollectives(
            [(one.op, _names(one.places), one.packing) for one in trace.collectives]
        )
        self.weights: dict[int, float] | None = None
        self._has_run = self._may_have_changed = False
        self._undo: list[tuple[Tensor, Tensor]] = []
        self._before: Tensor | None = None  # the state of the generator that gives seeds
        self._is_raw = launcher.is_raw or any(
            one.is_raw for called in levels for one in called if one is not None
        )

    def fits(self, part: Sequence[Any]) -> bool:
        """Whether the trace is valid for these leaves of a replica's arguments.

        ``numbers_hold`` checks the numbers among them that are inputs.
        """
        tensors = [leaf for leaf in part if isinstance(leaf, Tensor)]
        trace = self.trace
        return (
            self._constant_leaves(part) == self._constant_leaves(self._leaves)
            and list(map(layout, tensors)) == trace.layouts
            and self._sizes.fit(tensors)
        )

    def _constant_leaves(self, part: Sequence[Any]) -> list[Any]:
        """Returns the leaves that are constants of the trace, with their types."""
        traced = self.trace.traced_leaves
        return [
            (type(leaf), leaf)
            for i, leaf in enumerate(part)
            if not isinstance(leaf, Tensor) and i not in traced
        ]

    def numbers_hold(self, arguments: StepArguments) -> bool:
        """Whether comparisons of numbers have the same outcomes as in the trace."""
        return self._bindings.take_numbers(arguments)

    def find_change(self, arguments: StepArguments, part: Sequence[Any] | None) -> str | None:
        """Returns a difference to the trace in words: of a leaf, a number, or state."""
        found = None if part is None else self._find_leaf_change(part, arguments.names())
        return (
            found or self._bindings.find_number_change(arguments) or self._bindings.find_change()
        )

    def _find_leaf_change(self, part: Sequence[Any], names: Sequence[str]) -> str | None:
        if len(part) != len(self._leaves):
            return f"there are {len(part)} arguments, and were {len(self._leaves)}"
        for i, (name, then, now) in enumerate(zip(names, self._leaves, part, strict=True)):
            if i in self.trace.traced_leaves:
                continue
            if isinstance(then, Tensor) and isinstance(now, Tensor):
                before, after = _describe(then), _describe(now)
                if before != after:
                    return f"{name} was {before} and is {after}"
            elif type(then) is not type(now) or not isinstance(then, PLAIN) or then != now:
                return f"{name} was {_format_value(then)} and is {_format_value(now)}"
        return None

    def can_run(self) -> bool:
        """Whether the state and the gradients that the trace uses are there."""
        if self.trace.entering:
            self._param_sync.take_gradients()
        return self._bindings.hold()

    @torch.no_grad()
    def run(
        self, parts: dict[int, list[Any]], weights: Sequence[float] | None, weighing: CallShares
    ) -> dict[int, Sequence[Tensor]]:
        """Runs the step; returns its results, by replica that takes part.

        Args:
            parts: by replica that takes part, the tensors among its leaves.
            weights: the weights of the replicas; ``None`` if all are equal.
            weighing: the weights of the replicas of all workers.

        Raises:
            ProgramFailed: a program has raised an error.
        """
        bindings, timeline = self._bindings, self._replicas.timeline
        timeline.compiled.calls += 1
        if self._reductions.may_raise:  # the gradients of the step before stay, then
            self._param_sync.take_gradients()
        self._before = None if self._has_run else torch.get_rng_state()
        self._undo.clear()
        self._may_have_changed = False
        self._launcher.moves = self._param_sync.moves
        own = bindings.values(parts, weights, weighing.count)
        active = tuple(own)
        shared = {r: own[r] if r in own else bindings.idle(r) for r in bindings.leaders}
        shares = weighing.shares(active, weights, weighted=self._replicas.weighted)
        for shared_program, own_program, collectives in self._levels:
            if shared_program is not None:
                timeline.begin(CROSS, SHARED_PROGRAMS)
                self._launch(shared_program, shared)
                for leader, values in shared.items():
                    bindings.share_outputs(leader, values, own, shared_program.gives)
                timeline.end(CROSS, SHARED_PROGRAMS)
            if own_program is not None:
                timeline.begin(CROSS, PROGRAMS)
                self._launch(own_program, own)
                timeline.end(CROSS, PROGRAMS)
            for number, inputs, result_slots in collectives:
                self._reduce(number, inputs, result_slots, own, shared, shares)
        self._has_run = True
        self._undo.clear()
        if self._is_raw:
            increment_version(bindings.collect_written(shared, own))
        for module, mode in self.trace.modes:
            module.training = mode
        leader = bindings.leaders[0]
        grads = self._grads(shared[leader])
        if leader not in own:  # it has run no own program, which constants may be computed in
            first, device = self._grads(next(iter(own.values()))), self._replicas.devices[leader]
            grads = [
                other.to(device) if grad is ABSENT else grad
                for grad, other in zip(grads, first, strict=True)
            ]
        if self.trace.sets_weight:
            slot = self.plan.results[-1]
            self.weights = {r: check_weight(values[slot]) for r, values in own.items()}
        found = [*map(self._results, own.values())]
        kept = iter(self._launcher.keep([*chain.from_iterable(found)]))
        self._param_sync.record_step(self._changes, grads, self._launcher, active, weights)
        results: dict[int, Sequence[Tensor]] = {}
        for r in own:
            values = [*islice(kept, len(found[0]))]
            if self.trace.argument_grads:
                self._leave_argument_grads(parts[r], values[self._num_results :])
            results[r] = values[: self._num_results]
        return results

    def _leave_argument_grads(self, part: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Adds gradients to the arguments, and to the tensors that these are computed from."""
        for i, grad in zip(self.trace.argument_grads, grads, strict=True):
            part[i].requires_grad_().backward(grad)  # the step itself may have asked for it

    def _launch(self, program: CallableProgram, own: dict[int, list[Any]]) -> None:
        """Runs a program on the values of some replicas.

        Before the first run, the tensors that it writes are copied. They are restored if it fails.

        Raises:
            ProgramFailed: the program has raised an error.
        """
        if program.writes and not self._has_run:
            held = [values[slot] for values in own.values() for slot in program.writes]
            self._undo += [(tensor, tensor.clone()) for tensor in held]
        self._may_have_changed |= self._has_run and bool(program.writes)
        try:
            self._launcher.run(program, own)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            for tensor, before in reversed(self._undo):
                tensor.copy_(before)
            if self._before is not None:
                torch.set_rng_state(self._before)
            raise ProgramFailed(has_changed=self._may_have_changed) from error

    def _reduce(
        self,
        number: int,
        inputs: SlotGetter,
        result_slots: list[int],
        own: dict[int, list[Any]],
        shared: dict[int, list[Any]],
        shares: dict[int, float],
    ) -> None:
        """Reduces the tensors of all replicas at a collective point; gives each the result."""
        collective = self.trace.collectives[number]
        if collective.update is not None:
            self._update(collective, inputs, result_slots, own, shared)
            return
        payloads = {r: list(inputs(values)) for r, values in own.items()}
        if collective.op is None:
            self._replicas.timeline.begin(CROSS, REDUCTION, "gradients")
            shares = dict.fromkeys(shares, 1.0) if collective.is_weighed else shares
            reduced = self._reductions.reduce(payloads, shares, collective)
            self._replicas.timeline.end(CROSS, REDUCTION)
        else:
            words = f"all_reduce({collective.op}) in a compiled step"
            participants = Participants(len(payloads), differentiable=False)
            reduced, _ = all_reduce_payloads(
                self._replicas, collective.op, payloads, participants, words, None
            )
        first = next(iter(own))
        for r, values in {**shared, **own}.items():
            for slot, tensor in zip(
                result_slots, reduced[r if r in reduced else first], strict=True
            ):
                if slot >= 0:
                    values[slot] = tensor

    def _update(
        self,
        point: CollectivePoint,
        inputs: SlotGetter,
        result_slots: list[int],
        own: dict[int, list[Any]],
        shared: dict[int, list[Any]],
    ) -> None:
        """Has an optimizer step; gives each replica the parameters of its device."""
        self._may_have_changed = True
        leader_of = self._bindings.leader_of
        tensors = {leader: inputs(values) for leader, values in shared.items()}
        updated = self._param_sync.update(point, [tensors[leader] for leader in leader_of])
        for r, values in {**shared, **own}.items():
            for slot, tensor in zip(result_slots, updated[leader_of[r]], strict=False):
                if slot >= 0:
                    values[slot] = tensor


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _format_value(value: Any) -> str:
    return f"{value!r:.80}" if isinstance(value, PLAIN) else f"another {type(value).__name__}"


def _names(places: Sequence[StateTensor]) -> list[str]:
    """Returns the names of parameters in their records; to find paths would take a search."""
    return [getattr(place.record, "name", "?") for place in places]


def _changes(trace: StepTrace, plan: StepPlan) -> StateChanges:
    """Returns the changes of a step that the rest of the strategy sees."""
    changed = [(trace.inputs[i].kind, trace.inputs[i].of) for i in plan.written]

    def records(wanted: InputKind) -> list[Any]:
        places = [place for kind, place in changed if kind is wanted]
        return [place.record for place in places if place.record is not None]

    return StateChanges(
        records(InputKind.PARAMETER),
        records(InputKind.BUFFER),
        [swap.optimizer for swap in trace.swaps],
        [place for place, at in trace.grads.items() if at is not None],
        [place for place, at in trace.grads.items() if at is None],
    )
