"""AllParts: the parts of distributed values, of all workers' replicas.

[Note: Values of all workers]
``reduce`` and ``gather`` have every worker send its replicas' parts, and each combines the parts
of all as one process with as many replicas would: to the same bits, with the same errors. Those of
others are constants in its graph.

A loss made of such values is one that all workers have in common, and all of them start a backward
pass from it. Each has the gradient of its own parts then, which will count for ``W_w / T`` when
gradients are reduced (W_w: what the worker's replicas counted for in its last outermost run; T:
the sum over all workers). So it is multiplied by ``T / W_w`` where it comes to the own parts. T is
known from the exchange that has brought the parts; if another run has changed the weights since,
and all workers know that alike, they are exchanged anew in the backward pass.

A worker whose parts count nothing, and are left out, makes that pass like the others: they may
wait for it in a collective. Its parts get gradients of zeros.

What is no PerReplica is the worker's own, the loss of a split call for one, and counts in a mean
for what the worker's last run did.
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


def on_device(value: Any, device: torch.device) -> Tensor:
    """Returns a part as a tensor on the device where parts are combined.

    Raises:
        TypeError: it is neither tensor nor number.
    """
    if isinstance(value, Tensor):
        return value.to(device)
    if not is_number(value):
        raise TypeError(f"expected tensors or numbers, got a {type(value).__name__}")
    return torch.as_tensor(value, device=device)


class _Leaf(NamedTuple):
    """One worker's part of a leaf."""

    tensors: Sequence[Tensor]
    weights: Sequence[float]
    is_weighted: bool


class GradLink(NamedTuple):
    """What has a pass reach this worker's parts, whether they have been left out or not.

    Attributes:
        token: hangs on all of them; ``None`` where nothing requires a gradient.
    """

    token: Tensor | None = None

    def link(self, result: Tensor) -> Tensor:
        """Returns what the parts were combined to, as a function of this worker's in any case."""
        floats = result.is_floating_point() or result.is_complex()
        if self.token is None or result.requires_grad or not floats:
            return result
        tied: Tensor = _tied(result, self.token)
        return tied


def of_all_workers(runner: Runner, what: str, value: Any) -> tuple[Any, GradLink]:
    """Returns a structure with every leaf a PerReplica of the parts of all workers.

    Args:
        what: the operation and all that must be equal, in words.
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
    parcels = workers.exchange_tensors(what, structure, tensors, numbers)
    tie = GradLink()
    if any(parcel.numbers[1] for parcel in parcels) and torch.is_grad_enabled():
        tensors, tie = _shared(runner, what, parcels, tensors)
    parcels[workers.rank] = parcels[workers.rank]._replace(tensors=tensors)
    return rebuild_structure(value, _join(parcels, device)), tie


def _own(leaf: Any, device: torch.device, own_weight: float) -> _Leaf:
    if not isinstance(leaf, PerReplica):
        return _Leaf([on_device(leaf, device)], [own_weight], True)
    tensors = [on_device(part, device) for _, part in leaf.parts()]
    weights = [1.0 if leaf.weights is None else float(leaf.weights[r]) for r, _ in leaf.parts()]
    return _Leaf(tensors, weights, leaf.weights is not None)


def _own_weight(runner: Runner) -> float:
    """Returns what this worker's replicas count for: in the run going on, or in the last one."""
    running = runner.running
    return runner.replicas.workers.weight if running is None else sum(running.weights().values())


def _join(parcels: Sequence[Message], device: torch.device) -> list[PerReplica[Tensor]]:
    """Returns the leaves that several workers' parcels hold the parts of, one after the other."""
    tensors = [iter(parcel.tensors) for parcel in parcels]
    numbers = [iter(parcel.numbers[2:]) for parcel in parcels]
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


def _shared(
    runner: Runner, what: str, parcels: Sequence[Message], tensors: list[Tensor]
) -> tuple[list[Tensor], GradLink]:
    """Returns the own parts as what the loss of all workers is made of."""
    which = [i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
    if runner.running is not None:
        # Its backward passes may be inside run, where every replica has a loss of its own.
        name = f"{what} in a merge_call, over several workers,"
        views, tie = [not_differentiable(tensors[i].detach(), name) for i in which], GradLink()
    else:
        workers = runner.replicas.workers
        workers.agreed = workers.num_runs, sum(parcel.numbers[0] for parcel in parcels)
        # Others may have parts that require a gradient where this one has none.
        anchor = zeros_to_differentiate(runner.replicas)
        token, *views = _share(workers, anchor, *[tensors[i] for i in which])
        tie = GradLink(token)
    shared = list(tensors)
    for i, view in zip(which, views, strict=True):
        shared[i] = view
    return shared, tie


class Share(torch.autograd.Function):
    """A worker's parts of values that all workers' common loss is made of."""

    @staticmethod
    def forward(
        ctx: Any, workers: LocalWorkerGroup, anchor: Tensor, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.workers = workers
        return anchor.clone(), *[part.view_as(part) for part in parts]

    @staticmethod
    def backward(ctx: Any, zero: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        workers: LocalWorkerGroup = ctx.workers
        if workers.agreed[0] != workers.num_runs:
            parcels = workers.exchange_tensors(
                "the weights of the workers, in a backward pass", None, [], [workers.weight]
            )
            workers.agreed = workers.num_runs, sum(parcel.numbers[0] for parcel in parcels)
        total, own = workers.agreed[1], workers.weight
        if own == 0:
            return None, zero, *map(torch.zeros_like, grads)
        return None, None, *[grad * (total / own) for grad in grads]


class LinkedGrad(torch.autograd.Function):
    """A result, as a function of what does not change it."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, token: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, grad.new_zeros(())


# ``apply`` is untyped.
_share: Any = Share.apply
_tied: Any = LinkedGrad.apply
