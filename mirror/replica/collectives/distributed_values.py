"""Exchanges the parts of distributed values between workers, for ``reduce`` and ``gather``.

[Note: Values of all workers]
Every worker sends its replicas' parts, and combines the parts of all workers as one process with
as many replicas would: same bits, same errors. Parts of other workers are constants in its graph.

All workers start a backward pass from a loss of such values. Each computes the gradient of its own
parts, and the reduction of gradients multiplies it by ``W_w / T``: W_w is the weight of worker w's
replicas in its last outermost run, T the sum over workers. So the gradient is multiplied by
``T / W_w`` where it reaches the worker's parts. T comes with the parts; if a later run has changed
the weights, the workers exchange them again in the backward pass. With
``gradient_reduction="sum"`` the workers' gradients are added as they are: nothing is multiplied.

A worker with weight 0 makes that pass too, since other workers may wait for it in a collective.
Its parts get gradients of zeros. A value that is not a PerReplica, such as the loss of a split
call, is the worker's own; in a mean its weight is that of the worker's last run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirror.comm.workers.worker_group import LocalWorkerGroup, Message
from mirror.execution.runner import Runner
from mirror.replica.collectives.autograd_nodes import not_differentiable
from mirror.replica.multi_worker.stand_in import zeros_to_differentiate
from mirror.values import (
    PerReplica,
    describe_structure,
    is_number,
    leaves_of,
    rebuild_structure,
)


def exchange_parts(runner: Runner, what: str, value: Any) -> tuple[Any, GradLink]:
    """Returns the structure with each leaf a PerReplica of all workers' parts, and their link.

    Args:
        what: the operation with the arguments that must be equal on all workers, for errors.
    """
    workers, device = runner.replicas.workers, runner.replicas.devices[0]
    own_weight = _own_weight(runner)
    leaves = [_own(leaf, device, own_weight) for leaf in leaves_of(value)]
    tensors = [tensor for leaf in leaves for tensor in leaf.tensors]
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    numbers: list[float] = [own_weight, wanted]
    for leaf in leaves:
        numbers += [leaf.is_weighted, len(leaf.tensors), *leaf.weights]
    structure = describe_structure(value)
    messages = workers.exchange_tensors(what, structure, tensors, numbers)
    link = GradLink()
    if any(message.numbers[1] for message in messages) and torch.is_grad_enabled():
        tensors, link = _scale_own_parts(runner, what, messages, tensors)
    messages[workers.rank] = messages[workers.rank]._replace(tensors=tensors)
    return rebuild_structure(value, _join(messages, device)), link


def on_device(value: Any, device: torch.device) -> Tensor:
    """Returns a part as a tensor on the device where parts are combined.

    Raises:
        TypeError: the part is neither a tensor nor a number.
    """
    if isinstance(value, Tensor):
        return value.to(device)
    if not is_number(value):
        raise TypeError(f"expected tensors or numbers, got a {type(value).__name__}")
    return torch.as_tensor(value, device=device)


class _OwnParts(NamedTuple):
    """This worker's parts of a leaf, with their weights."""

    tensors: Sequence[Tensor]
    weights: Sequence[float]
    is_weighted: bool


class GradLink(NamedTuple):
    """Makes a backward pass reach this worker's parts, also if a result leaves them out.

    Attributes:
        token: a tensor that depends on all parts; ``None`` if nothing requires a gradient.
    """

    token: Tensor | None = None

    def link(self, result: Tensor) -> Tensor:
        """Returns the combined result as a function of this worker's parts."""
        floats = result.is_floating_point() or result.is_complex()
        if self.token is None or result.requires_grad or not floats:
            return result
        linked: Tensor = _link_grad(result, self.token)
        return linked


def _own(leaf: Any, device: torch.device, own_weight: float) -> _OwnParts:
    if not isinstance(leaf, PerReplica):
        return _OwnParts([on_device(leaf, device)], [own_weight], True)
    tensors = [on_device(part, device) for _, part in leaf.parts()]
    weights = [1.0 if leaf.weights is None else float(leaf.weights[r]) for r, _ in leaf.parts()]
    return _OwnParts(tensors, weights, leaf.weights is not None)


def _own_weight(runner: Runner) -> float:
    """Returns the weight of this worker's replicas in the active run, or in the last one."""
    running = runner.running
    return runner.replicas.workers.weight if running is None else sum(running.weights().values())


def _join(messages: Sequence[Message], device: torch.device) -> list[PerReplica[Tensor]]:
    """Returns the leaves with the parts of all messages, one worker after the other."""
    tensors = [iter(message.tensors) for message in messages]
    numbers = [iter(message.numbers[2:]) for message in messages]
    leaves = []
    while (flags := [next(mine, None) for mine in numbers])[0] is not None:
        values: list[Tensor] = []
        weights: list[float] = []
        for parts, mine in zip(tensors, numbers, strict=True):
            num_parts = int(next(mine))
            values += [next(parts).to(device) for _ in range(num_parts)]
            weights += [next(mine) for _ in range(num_parts)]
        leaves.append(PerReplica(values, weights=weights if any(flags) else None))
    return leaves


def _scale_own_parts(
    runner: Runner, what: str, messages: Sequence[Message], tensors: list[Tensor]
) -> tuple[list[Tensor], GradLink]:
    """Returns this worker's parts with scaled gradients, as parts of all workers' loss."""
    which = [i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
    if runner.running is not None:
        # Its backward passes may be inside run, where every replica has a loss of its own.
        name = f"{what} in a merge_call, over several workers,"
        views, link = [not_differentiable(tensors[i].detach(), name) for i in which], GradLink()
    else:
        workers = runner.replicas.workers
        workers.agreed = workers.num_runs, sum(message.numbers[0] for message in messages)
        # The anchor requires a gradient even if no part of this worker does.
        anchor = zeros_to_differentiate(runner.replicas)
        parts = [tensors[i] for i in which]
        token, *views = _scale_grads(workers, runner.replicas.weighted, anchor, *parts)
        link = GradLink(token)
    scaled = list(tensors)
    for i, view in zip(which, views, strict=True):
        scaled[i] = view
    return scaled, link


class ScaledGrads(torch.autograd.Function):
    """A worker's parts, their gradients scaled by the inverse of the worker's share."""

    @staticmethod
    def forward(
        ctx: Any, workers: LocalWorkerGroup, weighted: bool, anchor: Tensor, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.workers, ctx.weighted = workers, weighted
        return anchor.clone(), *[part.view_as(part) for part in parts]

    @staticmethod
    def backward(ctx: Any, zero: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        workers: LocalWorkerGroup = ctx.workers
        if ctx.weighted and workers.agreed[0] != workers.num_runs:
            messages = workers.exchange_tensors(
                "the weights of the workers, in a backward pass", None, [], [workers.weight]
            )
            workers.agreed = workers.num_runs, sum(message.numbers[0] for message in messages)
        total, own = workers.agreed[1], workers.weight
        if own == 0:
            return None, None, zero, *map(torch.zeros_like, grads)
        scale = total / own if ctx.weighted else 1.0
        return None, None, None, *[grad * scale for grad in grads]


class LinkedGrad(torch.autograd.Function):
    """A result as a function of a token that does not change it."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, token: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, grad.new_zeros(())


# ``apply`` is untyped.
_scale_grads: Any = ScaledGrads.apply
_link_grad: Any = LinkedGrad.apply
