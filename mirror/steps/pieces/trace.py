"""Trace: one trace of a step, and what its inputs and results mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from mirror.errors import CompileError
from mirror.execution.replicas import Replicas
from mirror.steps.following.graphs import follow
from mirror.steps.following.leases import Lease
from mirror.steps.following.stand_ins import StandIns
from mirror.steps.following.tracing import Meeting, Tracer
from mirror.steps.following.unchanged import Unchanged
from mirror.steps.inputs import Input, Kind
from mirror.steps.places import Place
from mirror.values import leaves_of, map_structure, rebuild_structure


@dataclass(eq=False, slots=True)
class Trace:
    """A step, traced.

    Attributes:
        graph: what it does, as it does it: with writes in place.
        device: what in the graph names the device of whoever runs it.
        inputs: what it reads and writes; the first slots of its pieces.
        fakes: what stood for the tensors among the arguments' leaves.
        structure: what the step returns, with leaves in place of tensors.
        leaves: those that are no tensors; of tensors that are to be numbers, their type.
        is_tensor: of each leaf, whether it comes from a slot.
        grads: what gradient each parameter is left with: a position in the results, or ``None``.
        draws: how many places draw random numbers.
        modes: the modes that the step leaves modules with, where it changes them.
        rates_read: the optimizers whose learning rates are those of the trace.
    """

    graph: fx.GraphModule
    device: torch.device
    inputs: list[Input]
    fakes: list[Tensor]
    plain: list[Any]
    layouts: list[Any]
    mode: Any
    structure: Any
    leaves: list[Any]
    is_tensor: list[bool]
    grads: dict[Place, int | None]
    entering: dict[Place, bool]
    meetings: list[Meeting]
    modules: list[nn.Module]
    leases: list[Lease]
    draws: int
    modes: list[tuple[nn.Module, bool]]
    rates_read: list[Optimizer]


class _InOptimizerError(Exception):
    """An optimizer's step has asked for another value than its learning rate."""


def trace(
    step: Callable[..., Any],
    call: Callable[[Sequence[Any]], Any],
    leaves: Sequence[Any],
    own: Sequence[bool],
    replicas: Replicas,
    places: Sequence[Place],
    grads: dict[Place, Tensor],
    *,
    meets_alone: bool = False,
    constant_rates: bool = False,
) -> Trace:
    """Traces a step.

    Args:
        call: calls the step with these leaves of its arguments.
        leaves: one replica's; its tensors are what the trace is made for.
        own: of each leaf, whether every replica has one of its own.
        grads: those that parameters have.
        meets_alone: whether gradients are met where there is one replica, too: to be looked at.
        constant_rates: whether learning rates are the numbers that they are, and no inputs; it is
            tried where an optimizer's step asks for a value.

    Raises:
        CompileError: it does what no trace can follow.
        StateMissing: it makes optimizer state.
    """
    stand_ins = StandIns(places, grads, replicas.num_replicas)
    fakes: list[Tensor] = []
    args: list[Any] = []
    for i, (leaf, is_own) in enumerate(zip(leaves, own, strict=True)):
        if isinstance(leaf, Tensor):
            kind = Kind.PART if is_own else Kind.SHARED
            leaf = stand_ins.add(kind, leaf, i, batched=is_own)
            fakes.append(leaf)
        args.append(leaf)
    tracer = Tracer(replicas, stand_ins, meets_alone=meets_alone, constant_rates=constant_rates)
    unchanged = Unchanged(step, tracer, replicas)
    returned: list[Any] = []
    numbers: list[Any] = []
    left: dict[Place, Tensor | None] = {}

    def followed() -> Sequence[Tensor]:
        with unchanged:
            result = tracer.follow(lambda: call(args))
        numbers.extend(map(_number, leaves_of(result)))
        result = map_structure(_as_tensor, result)
        returned.append(result)
        assert tracer.gradients is not None
        left.update(tracer.gradients.left)
        for place in places:
            after = stand_ins.assigned.get(id(place.record))
            if after is not None and after is not stand_ins.standing_for(place):
                stand_ins.standing_for(place).copy_(after)
        tensors = [leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor)]
        tensors += [grad for grad in left.values() if grad is not None]
        return [stand_ins.by_id().get(id(t), t).detach() for t in tensors]

    try:
        graph, inputs = follow(followed, stand_ins.mode, stand_ins.inputs)
    except CompileError as error:
        if not tracer.failed_in_optimizer:
            raise
        if constant_rates:
            raise _InOptimizerError from error
        try:  # it may have wanted to know its learning rate
            return trace(
                step,
                call,
                leaves,
                own,
                replicas,
                places,
                grads,
                meets_alone=meets_alone,
                constant_rates=True,
            )
        except _InOptimizerError:
            raise error from None
    result = returned[0]
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves_of(result)]
    position = sum(is_tensor)
    positions: dict[Place, int | None] = {}
    for place, grad in left.items():
        positions[place] = None
        if grad is not None:
            positions[place] = position
            position += 1
    stepped = [lease.optimizer for lease in tracer.leases.all.values()]
    return Trace(
        graph,
        stand_ins.device,
        inputs,
        fakes,
        [leaf for leaf in leaves if not isinstance(leaf, Tensor)],
        [layout(leaf) for leaf in leaves if isinstance(leaf, Tensor)],
        stand_ins.mode,
        rebuild_structure(result, [None] * len(is_tensor)),
        [
            number if isinstance(leaf, Tensor) else leaf
            for number, leaf in zip(numbers, leaves_of(result), strict=True)
        ],
        is_tensor,
        positions,
        dict(tracer.gradients.looked_at) if tracer.gradients is not None else {},
        tracer.meetings,
        list(tracer.modules.values()),
        list(tracer.leases.all.values()),
        tracer.draws.count,
        unchanged.modes,
        [*unchanged.rates_read, *(stepped if constant_rates else ())],
    )


def _number(leaf: Any) -> type | None:
    """Returns what a number that depends on sizes is outside of a trace."""
    return (
        int
        if isinstance(leaf, torch.SymInt)
        else float
        if isinstance(leaf, torch.SymFloat)
        else None
    )


def _as_tensor(leaf: Any) -> Any:
    if _number(leaf) is None:
        return leaf
    dtype = torch.int64 if _number(leaf) is int else torch.float64
    return torch.scalar_tensor(leaf, dtype=dtype)


def layout(tensor: Tensor) -> tuple[bool, bool]:
    """Returns what of a tensor's layout programs are made for."""
    return tensor.is_contiguous(), tensor.requires_grad
