"""One trace of a step, with the meaning of its inputs and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from mirror.comm.communicator import extent_bytes
from mirror.compiler.capture.functional_graph import trace_functional, written_inputs
from mirror.compiler.capture.placeholders import Placeholders
from mirror.compiler.capture.side_effects import UnchangedSurroundings
from mirror.compiler.capture.traced_numbers import TracedNumbers, is_traced_number
from mirror.compiler.capture.traced_swap import TracedSwap
from mirror.compiler.capture.tracer import CollectivePoint, Tracer
from mirror.compiler.free_variables import FreeVariables
from mirror.compiler.step_errors import RunsUncompiled, StateMissing
from mirror.compiler.step_inputs import InputKind, StateTensor, StepInput
from mirror.compiler.varying_inputs import VaryingInputs
from mirror.errors import CompileError
from mirror.execution.replicas import Replicas
from mirror.values import leaves_of, map_structure, rebuild_structure


@dataclass(eq=False, slots=True)
class StepTrace:
    """A traced step.

    Attributes:
        graph: the operations of the step, with writes in place.
        device: the device of the trace, which the graph names.
        inputs: the tensors that it reads and writes; the first slots of its pieces.
        fakes: the placeholders of the tensors among the arguments' leaves.
        structure: the structure that the step returns.
        leaves: the leaves of it that are not tensors; for a tensor that becomes a number, the
            type of the number.
        is_tensor: for each leaf, whether it comes from a slot.
        argument_grads: the numbers of the tensors among the arguments' leaves that the step leaves
            a gradient in; their gradients follow its results.
        grads: for each parameter, the position of its gradient in the results, or ``None``.
        draws: the number of draws of random numbers.
        modes: the modules that get another mode in the step, with that mode.
        rates_read: the optimizers with learning rates that are constants of the trace.
        numbers: the numbers of Python that are inputs.
        traced_leaves: the numbers among the arguments' leaves that are inputs.
        sets_weight: whether the last result is the weight that the step gives a replica.
        scalers: the gradient scalers that it uses.
    """

    graph: fx.GraphModule
    device: torch.device
    inputs: list[StepInput]
    fakes: list[Tensor]
    plain: list[Any]
    layouts: list[Any]
    mode: Any
    structure: Any
    leaves: list[Any]
    is_tensor: list[bool]
    argument_grads: list[int]
    grads: dict[StateTensor, int | None]
    entering: dict[StateTensor, bool]
    collectives: list[CollectivePoint]
    modules: list[nn.Module]
    swaps: list[TracedSwap]
    draws: int
    modes: list[tuple[nn.Module, bool]]
    rates_read: list[Optimizer]
    numbers: TracedNumbers
    traced_leaves: frozenset[int]
    sets_weight: bool
    scalers: list[Any]

    @property
    def stepped_apart(self) -> list[Optimizer]:
        """The optimizers that step between programs."""
        return [one.update.optimizer for one in self.collectives if one.update is not None]


def trace_step(
    step: Callable[..., Any],
    call: Callable[[Sequence[Any]], Any],
    leaves: Sequence[Any],
    own: Sequence[bool],
    replicas: Replicas,
    places: Sequence[StateTensor],
    grads: dict[StateTensor, Tensor],
    varying: VaryingInputs,
    *,
    reduces_alone: bool = False,
    around: FreeVariables | None = None,
) -> StepTrace:
    """Traces a step.

    Learning rates are inputs: tensors, or numbers where the optimizer's step asks for their
    values. Where it can use neither, they are constants. So are all numbers if the step cannot be
    traced with those that have changed as inputs.

    Args:
        call: calls the step with these leaves of its arguments.
        leaves: the leaves of one replica, for which the trace is made.
        own: for each leaf, whether every replica has its own.
        grads: the gradients that parameters have.
        varying: the values that are inputs, because they have changed between calls.
        reduces_alone: whether gradients have a collective point even with one replica.
        around: given if the step is the call of a module: the values that its code finds by their
            names. It draws from the generators, and hooks of parameters are called outside it.

    Raises:
        CompileError: it cannot be traced.
        StateMissing: it creates optimizer state.
        RunsUncompiled: it checks a value where arguments have these sizes.
    """

    def attempt(rates: str, inputs: VaryingInputs) -> _Try:
        placeholders = Placeholders(places, grads, replicas.workers.num_replicas)
        numbers = TracedNumbers(placeholders.add, inputs.is_option, inputs.is_number)
        tracer = Tracer(
            replicas,
            placeholders,
            reduces_alone=reduces_alone,
            numbers=numbers,
            rates=rates,
            is_of_module=around is not None,
        )
        unchanged = UnchangedSurroundings(step, tracer, replicas, around)
        return _Try(call, placeholders, tracer, unchanged, places, inputs)

    first = attempt("tensors", varying)
    try:
        return first.trace(leaves, own)
    except (RunsUncompiled, StateMissing):
        raise
    except Exception as error:
        others: list[tuple[str, VaryingInputs]] = []
        if first.tracer.numbers.sources:
            others.append(("tensors", varying.copy_without_numbers()))
        if first.tracer.failed_in_optimizer and isinstance(error, CompileError):
            others += [("numbers", varying), ("constants", varying.copy_without_numbers())]
        for rates, inputs in others:
            one = attempt(rates, inputs)
            try:
                found = one.trace(leaves, own)
            except (RunsUncompiled, StateMissing):
                raise
            except Exception as another:
                is_of_step = isinstance(another, CompileError) and rates == "constants"
                if is_of_step and not one.tracer.failed_in_optimizer:
                    raise
                continue
            if rates == "constants":
                found.rates_read += [swap.optimizer for swap in found.swaps]
            return found
        raise


class _Try:
    """One attempt to trace a step, with placeholders of its own.

    Attributes:
        tracer: the tracer of this attempt.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Any]], Any],
        placeholders: Placeholders,
        tracer: Tracer,
        unchanged: UnchangedSurroundings,
        places: Sequence[StateTensor],
        varying: VaryingInputs,
    ) -> None:
        self._call, self._placeholders, self._varying = call, placeholders, varying
        self.tracer, self._unchanged, self._places = tracer, unchanged, places
        self._result: Any = None
        self._argument_grads: dict[int, Tensor] = {}
        self._numbers: list[type | None] = []
        self._left: dict[StateTensor, Tensor | None] = {}

    def trace(self, leaves: Sequence[Any], own: Sequence[bool]) -> StepTrace:
        """Traces the step, called with these leaves; see ``trace_step``."""
        placeholders, tracer = self._placeholders, self.tracer
        args = [
            self._placeholder_for(i, *one) for i, one in enumerate(zip(leaves, own, strict=True))
        ]
        wanted = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        graph, inputs = trace_functional(
            lambda: self._call_step(args, wanted),
            placeholders.mode,
            placeholders.inputs,
            keeps_kernels=tracer.is_of_module,
        )
        self._refuse_overlaps(inputs, written_inputs(graph, inputs))
        returned = leaves_of(self._result)
        is_tensor = [isinstance(leaf, Tensor) for leaf in returned]
        gradients = tracer.gradients
        return StepTrace(
            graph=graph,
            device=placeholders.device,
            inputs=inputs,
            fakes=[leaf for leaf in args if isinstance(leaf, Tensor)],
            plain=[leaf for leaf in leaves if not isinstance(leaf, Tensor)],
            layouts=[layout(leaf) for leaf in leaves if isinstance(leaf, Tensor)],
            mode=placeholders.mode,
            structure=rebuild_structure(self._result, [None] * len(returned)),
            leaves=[
                number if isinstance(leaf, Tensor) else leaf
                for number, leaf in zip(self._numbers, returned, strict=True)
            ],
            is_tensor=is_tensor,
            argument_grads=list(self._argument_grads),
            grads=_positions(self._left, sum(is_tensor) + len(self._argument_grads)),
            entering={} if gradients is None else dict(gradients.looked_at),
            collectives=tracer.collectives,
            modules=list(tracer.modules.values()),
            swaps=list(tracer.swaps.all.values()),
            draws=tracer.draws.count,
            modes=self._unchanged.modes,
            rates_read=[*self._unchanged.rates_read],
            numbers=tracer.numbers,
            traced_leaves=frozenset(
                source.name for source in tracer.numbers.sources if source.optimizer is None
            ),
            sets_weight=tracer.weight is not None,
            scalers=list(tracer.scalers),
        )

    def _refuse_overlaps(self, inputs: Sequence[StepInput], written: Sequence[StepInput]) -> None:
        """Refuses a tensor that lies in the memory of a parameter or buffer that is written.

        To the graph the two have nothing in common: a program may read one before it writes the
        other, or write both.
        """
        changed = set(map(id, written))
        spans = [
            _Span(tensor, one.of, "", i, id(one) in changed)
            for i, one in enumerate(inputs)
            if one.kind in (InputKind.PARAMETER, InputKind.BUFFER)
            for tensor in one.of.tensors()
        ]
        for tensor, line in self.tracer.captured.values():
            spans.append(_Span(tensor, None, f"{line}: "))
        spans.sort(key=lambda span: span.begin)
        widest = None
        for span in spans:
            if widest is None or span.begin >= widest.end:
                widest = span
                continue
            if (span.is_written or widest.is_written) and span.number != widest.number:
                raise CompileError(
                    f"the step cannot be compiled: {span.line or widest.line}{span} and "
                    f"{widest} lie in the same memory, which the step writes; use one object "
                    "for both (b.weight = a.weight), or pass fallback='eager'"
                )
            widest = max(widest, span, key=lambda one: one.end)

    def _placeholder_for(self, index: int, leaf: Any, is_own: bool) -> Any:
        """Returns the placeholder of a leaf of the arguments."""
        if not isinstance(leaf, Tensor):
            return self.tracer.numbers.argument(index, leaf, is_own=is_own)
        kind = InputKind.PART if is_own else InputKind.SHARED
        dynamic = self._varying.dimensions(index)
        return self._placeholders.add(kind, leaf, index, dynamic=dynamic, batched=is_own)

    def _call_step(self, args: Sequence[Any], wanted: Sequence[bool]) -> Sequence[Tensor]:
        """Calls the step; returns results, gradients, and the weight if the step sets one.

        Args:
            wanted: for each argument, whether it is a tensor that requires a gradient.
        """
        args = [
            arg.detach().requires_grad_() if requires_grad else arg
            for arg, requires_grad in zip(args, wanted, strict=True)
        ]
        with self._unchanged:
            result = self.tracer.trace(lambda: self._call(args))
        self._numbers = list(map(_number, leaves_of(result)))
        self._result = map_structure(_as_tensor, result)
        assert self.tracer.gradients is not None
        self._left = dict(self.tracer.gradients.left)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        self._argument_grads = {
            i: t.grad for i, t in enumerate(tensors) if t.is_leaf and t.grad is not None
        }
        placeholders = self._placeholders
        by_id = placeholders.index_by_id()
        replaced: list[tuple[Tensor, Tensor]] = []
        for place in self._places:
            after = placeholders.assigned.get(id(place.record))
            if place.record is None:
                after = self._unchanged.buffers.get(id(place.owner))
                after = by_id.get(id(after), after)
            before = placeholders.placeholder_of(place)
            if after is not None and after is not before:
                if (after.shape, after.dtype) != (before.shape, before.dtype):
                    raise CompileError(
                        f"the step cannot be compiled: the buffer {place.name!r}, of shape "
                        f"{tuple(before.shape)} and {before.dtype}, is replaced by a tensor of "
                        f"another shape or dtype, {tuple(after.shape)} and {after.dtype}; keep "
                        "both, or pass fallback='eager'"
                    )
                replaced.append((before, after.clone()))  # it may be another buffer
        for before, after in replaced:
            before.copy_(after)
        tensors = [leaf for leaf in leaves_of(self._result) if isinstance(leaf, Tensor)]
        tensors += self._argument_grads.values()
        tensors += [grad for grad in self._left.values() if grad is not None]
        tensors += [] if self.tracer.weight is None else [self.tracer.weight]
        return [by_id.get(id(t), t).detach() for t in tensors]


def _positions(
    left: dict[StateTensor, Tensor | None], first: int
) -> dict[StateTensor, int | None]:
    """Returns the positions of gradients in the results, from ``first`` on."""
    numbers = count(first)
    return {place: None if grad is None else next(numbers) for place, grad in left.items()}


def _number(leaf: Any) -> type | None:
    """Returns the type of a number that depends on inputs; ``None`` for other leaves."""
    if isinstance(leaf, torch.SymInt):
        return int
    return float if isinstance(leaf, torch.SymFloat) else None


def _as_tensor(leaf: Any) -> Any:
    if _number(leaf) is None:
        return leaf
    dtype = torch.int64 if _number(leaf) is int else torch.float64
    if is_traced_number(leaf):
        found: Tensor = leaf.numbers.tensor(leaf, dtype)
        return found.clone()
    return torch.scalar_tensor(leaf, dtype=dtype)


class _Span:
    """Where a tensor's elements lie.

    Attributes:
        begin, end: the first address, and the one after the last; both 0 if it has no memory.
        place: the parameter or buffer; ``None`` for other tensors.
        line: the line that uses it, with a colon; empty for parameters and buffers.
        number: that of the parameter or buffer; -1 for other tensors.
        is_written: whether the step writes it.
    """

    def __init__(
        self,
        tensor: Tensor,
        place: StateTensor | None,
        line: str,
        number: int = -1,
        is_written: bool = False,
    ) -> None:
        self.place, self.line, self.number, self.is_written = place, line, number, is_written
        self._shape = tuple(tensor.shape)
        self.begin = self.end = 0
        if tensor.layout is torch.strided and tensor.numel():
            self.begin = tensor.data_ptr()
            self.end = self.begin + extent_bytes(tensor)

    def __str__(self) -> str:  # a name takes long to find
        return f"a tensor of shape {self._shape}" if self.place is None else repr(self.place.name)


def layout(tensor: Tensor) -> tuple[bool, bool]:
    """Returns the properties of a tensor that programs depend on."""
    return tensor.is_contiguous(), tensor.requires_grad
