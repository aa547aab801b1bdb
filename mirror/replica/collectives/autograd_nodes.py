"""Gradients of collectives, and of ``reduce`` and ``gather`` over the values of all workers.

[Note: Gradients of collectives]
Inside ``run`` each replica starts a backward pass from its own loss with weight w_r. The gradient
of SUM at replica s is therefore the sum over r of (w_r / w_s) g_r; MEAN divides it by n. A pass
outside ``run`` starts from one loss: the gradient is the plain sum, or the mean. One graph serves
both, with two nodes per replica; the backward pass goes from right to left:

    x_r -> GradReduce_r -> GradSend_r -> y_r

Inside ``run``, GradSend merges the replicas and computes the result. Outside, one thread goes
through all replicas and must not wait: GradSend stores its gradient, and GradReduce needs those of
all replicas. The engine takes ready nodes by descending sequence number. So GradReduce gets a
number below every other node's, ascending from collective to collective: when it runs, a GradSend
that has not run is not part of the pass, and its gradient is zero. That order exists in one thread
only, so the pass stays in the calling thread: [Note: Autograd's threads]. Numbers are counted per
thread: a thread's number is advanced past those of GradReduce where its next nodes may join the
replicas. If a gradient still arrives after the sum, the pass raises StrategyError.

With several workers, each makes that pass from its own loss. The first GradReduce of a collective
exchanges the workers' weighted sums. The order of collectives is the same on all workers.

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

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirror.base.mutex import Mutex
from mirror.base.torch_private import (
    current_graph_task_id,
    queue_callback,
    sequence_number,
    set_sequence_number,
)
from mirror.comm.reduce_ops import reduce_tensors
from mirror.comm.workers.worker_group import LocalWorkerGroup, Message
from mirror.device.streams import ReplicaStreams
from mirror.errors import StrategyError
from mirror.execution.replica_thread import serial_graphs
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica, replica_of
from mirror.execution.runner import Runner
from mirror.replica.collectives.over_workers import Participants, weighted_sum_over_workers
from mirror.replica.params.torch_function import make_common
from mirror.replica.params.workers_without_examples import zeros_to_differentiate
from mirror.values import PerReplica, describe_structure, is_number, leaves_of, rebuild_structure


class SequenceNumbers:
    """The sequence numbers of GradReduce nodes, below those of every other live node.

    Attributes:
        entered: the latest number, if a state has entered since there was none.
    """

    def __init__(self) -> None:
        self._lock = Mutex()
        self._live: weakref.WeakSet[CollectiveState] = weakref.WeakSet()
        self._latest = 0
        self.entered: list[int] = []

    def enter(self, state: CollectiveState) -> int:
        """Returns a number above those of all collectives with live graphs."""
        return self._lock.call(self._enter, state)

    def _enter(self, state: CollectiveState) -> int:
        self._latest = self._latest + 1 if len(self._live) else 0
        self._live.add(state)
        self.entered[:] = [self._latest]
        return self._latest

    def advance(self, run: object = None) -> None:
        """Advances the thread's sequence number past the latest GradReduce's; often by none."""
        if not self.entered or not self._lock.call(self._has_live):
            return
        with torch.inference_mode(False), torch.enable_grad():
            anchor = _anchor()
            while True:
                node: Any = anchor.view_as(anchor).grad_fn
                if sequence_number(node) > self._latest:
                    return

    def _has_live(self) -> bool:
        if not len(self._live):
            self.entered.clear()
        return bool(self.entered)


order = SequenceNumbers()


class Arrivals:
    """What one backward pass outside ``run`` has brought to a collective.

    Attributes:
        grads: the gradients that GradSend has stored, by replica.
        streams: on GPUs, the streams on which the gradients were computed. The engine makes the
            stream of a node's own GPU current, and GradReduce reads the gradients of all.
        is_summed: whether a GradReduce has used them.
        totals: their sums over all workers, if there are several.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.grads: dict[int, tuple[Tensor, ...]] = {}
        self.streams = None if replicas.are_simulated else ReplicaStreams(replicas.mesh.replicas)
        self.is_summed = False
        self.totals: list[Tensor] | None = None


class CollectiveState:
    """The state of one collective that all replicas' nodes share.

    Attributes:
        active: the replicas of this worker that take part.
        participants: the replicas of all workers that take part.
        number: the sequence number of its GradReduce nodes.
        arrived: by graph task, what its pass has brought.
    """

    def __init__(self, active: Sequence[int], participants: Participants) -> None:
        self.active = tuple(active)
        self.participants = participants
        self.number = 0
        if participants.differentiable:
            self.number = order.enter(self)
            serial_graphs.add(self)
        self.arrived: dict[int, Arrivals] = {}

    def store(self, replicas: Replicas, replica_id: int, grads: tuple[Tensor, ...]) -> None:
        """Stores a replica's gradients until the pass outside ``run`` ends.

        Raises:
            StrategyError: the pass has used the sum without them.
        """
        task = current_graph_task_id()
        arrivals = self.arrived.get(task)
        if arrivals is None:
            arrivals = self.arrived[task] = Arrivals(replicas)
            queue_callback(partial(self.arrived.pop, task, None))
        if arrivals.streams is not None:
            for device in {grad.device for grad in grads}:
                arrivals.streams.record(replica_id, device)
        arrivals.grads[replica_id] = grads
        if arrivals.is_summed:  # after the store, in case another thread sums now
            raise StrategyError(
                f"replica {replica_id}'s gradient of a collective came after the sum of the "
                "gradients was used, so the sum lacks it; compute the loss in the thread that has "
                "called the model, and start the pass by backward() or torch.autograd.grad()"
            )

    def totals(self, replicas: Replicas, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sums of the gradients stored in a pass outside ``run``, like ``grads``.

        Raises:
            StrategyError: the pass has ``create_graph=True``, and there are several workers.
        """
        arrivals = self.arrived[current_graph_task_id()]
        arrivals.is_summed = True  # before they are read
        with nullcontext() if arrivals.streams is None else arrivals.streams.make_caller_wait():
            by_replica = [arrivals.grads[r] for r in self.active if r in arrivals.grads]
            rows = [*zip(*by_replica, strict=True)]
            if not replicas.workers.is_multi_process:
                devices = [grad.device for grad in grads]
                return list(map(reduce_tensors, rows, devices))
            if torch.is_grad_enabled():
                raise StrategyError(
                    "a backward pass with create_graph=True went through a collective, outside "
                    "run; over several workers it cannot be differentiated again: call it inside "
                    "run"
                )
            if arrivals.totals is None:
                own = [reduce_tensors(row, row[0].device) for row in rows]
                what = "the gradient of a collective"
                arrivals.totals = weighted_sum_over_workers(replicas, what, own)
            return [t.to(grad.device) for t, grad in zip(arrivals.totals, grads, strict=True)]


class CollectiveEnd:
    """One replica's side of a collective.

    Args:
        exchange: sums gradients over the replicas, weighted, inside ``run``.
        scale: the factor of the summed gradients, 1/n for MEAN.
        parts: for a gather, this replica's ``(axis, start, length)`` of each output.
    """

    def __init__(
        self,
        state: CollectiveState,
        replica: Replica,
        exchange: Callable[[Replica, Sequence[Tensor]], Sequence[Tensor]],
        *,
        scale: float = 1.0,
        parts: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        self.state = state
        self.replicas = replica.replicas
        self.replica_id = replica.replica_id
        self.exchange = exchange
        self.scale = scale
        self.parts = parts

    def connect(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the outputs, floating tensors, as functions of the inputs."""
        if (
            not self.state.participants.differentiable
            or not torch.is_grad_enabled()
            or not outputs
        ):
            return outputs
        order.advance()
        # The anchor creates nodes even if no input of this replica requires a gradient: the
        # backward passes of other replicas wait for this one.
        passed = _exchange(self, list(outputs), _anchor(), *inputs)
        set_sequence_number(passed[0].grad_fn, self.state.number)
        arrived: Sequence[Tensor] = _arrival(self, *passed)
        return arrived

    def current_replica(self) -> Replica | None:
        """Returns the replica of this thread; ``None`` outside ``run``."""
        return replica_of(self.replicas)


class GradReduce(torch.autograd.Function):
    """Outside ``run``: computes this replica's gradient from those of all replicas."""

    @staticmethod
    def forward(
        ctx: Any, end: CollectiveEnd, outputs: list[Tensor], anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        make_common(ctx)
        ctx.end = end
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        end: CollectiveEnd = ctx.end
        if end.current_replica() is None:
            grads = tuple(end.state.totals(end.replicas, grads))
        if end.scale != 1.0:
            grads = tuple(grad * end.scale for grad in grads)
        if end.parts is not None:
            grads = tuple(g.narrow(*part) for g, part in zip(grads, end.parts, strict=True))
        return None, None, None, *grads


class GradSend(torch.autograd.Function):
    """Inside ``run``: merges the replicas' gradients. Outside: stores this replica's."""

    @staticmethod
    def forward(ctx: Any, end: CollectiveEnd, *outputs: Tensor) -> tuple[Tensor, ...]:
        make_common(ctx)
        ctx.end = end
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        end: CollectiveEnd = ctx.end
        replica = end.current_replica()
        if replica is not None:
            return None, *end.exchange(replica, grads)
        end.state.store(end.replicas, end.replica_id, grads)
        return None, *grads


class NotDifferentiable(torch.autograd.Function):
    """Raises RuntimeError in a backward pass."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, name: str, anchor: Tensor) -> Tensor:
        ctx.name = name
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.name} is not differentiable; use 'sum' or 'mean', or detach its input"
        )


def refuse_backward(result: Tensor, name: str) -> Tensor:
    """Returns ``result`` as a tensor through which a backward pass raises RuntimeError."""
    refusing: Tensor = _refusal(result, name, _anchor())
    return refusing


def _anchor() -> Tensor:
    return torch.zeros((), requires_grad=True)


# ``apply`` is untyped.
_exchange: Any = GradReduce.apply
_arrival: Any = GradSend.apply
_refusal: Any = NotDifferentiable.apply


def exchange_parts(runner: Runner, what: str, value: Any) -> tuple[Any, GradLink]:
    """Returns the structure with each leaf a PerReplica of all workers' parts, and their link.

    Args:
        what: the operation with the arguments that must be equal on all workers, for errors.
    """
    workers, device = runner.replicas.workers, runner.replicas.devices[0]
    running = runner.running
    own_weight = workers.weight if running is None else sum(running.weights().values())
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


def move_part(value: Any, device: torch.device) -> Tensor:
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
        return _OwnParts([move_part(leaf, device)], [own_weight], True)
    tensors = [move_part(part, device) for _, part in leaf.parts()]
    weights = [1.0 if leaf.weights is None else float(leaf.weights[r]) for r, _ in leaf.parts()]
    return _OwnParts(tensors, weights, leaf.weights is not None)


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
        views, link = [refuse_backward(tensors[i].detach(), name) for i in which], GradLink()
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
