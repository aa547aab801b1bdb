"""The autograd nodes of a collective, for backward passes inside and outside ``run``.

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
that has not run is not part of the pass, and its gradient is zero.

With several workers, each makes that pass from its own loss. The first GradReduce of a collective
exchanges the workers' weighted sums. The order of collectives is the same on all workers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.base.torch_private import current_graph_task_id, sequence_number, set_sequence_number
from mirror.errors import StrategyError
from mirror.execution.current_replica import replica_of
from mirror.execution.replicas import Replica, Replicas
from mirror.replica.autograd_functions import make_common
from mirror.replica.collectives.over_workers import Participants, weighted_sum_over_workers
from mirror.replica.collectives.reduce_ops import summed


class SequenceNumbers:
    """The sequence numbers of GradReduce nodes, below those of every other live node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: weakref.WeakSet[CollectiveState] = weakref.WeakSet()
        self._latest = 0
        self._is_in_use = False  # a state has entered since there was none

    def enter(self, state: CollectiveState) -> int:
        """Returns a number above those of all collectives with live graphs."""
        with self._lock:
            self._latest = self._latest + 1 if len(self._live) else 0
            self._live.add(state)
            self._is_in_use = True
            return self._latest

    def advance(self, run: object = None) -> None:
        """Advances the thread's sequence number past the latest GradReduce's; often by none."""
        if not self._is_in_use:
            return
        with self._lock:
            self._is_in_use = len(self._live) > 0
        if not self._is_in_use:
            return
        with torch.inference_mode(False), torch.enable_grad():
            anchor = _anchor()
            while True:
                node: Any = anchor.view_as(anchor).grad_fn
                if sequence_number(node) > self._latest:
                    return


order = SequenceNumbers()


class CollectiveState:
    """The state of one collective that all replicas' nodes share.

    Attributes:
        active: the replicas of this worker that take part.
        participants: the replicas of all workers that take part.
        number: the sequence number of its GradReduce nodes.
        arrived: the gradients that GradSend has stored, by graph task and replica.
    """

    def __init__(self, active: Sequence[int], participants: Participants) -> None:
        self.active = tuple(active)
        self.participants = participants
        self.number = order.enter(self) if participants.differentiable else 0
        self.arrived: dict[int, dict[int, tuple[Tensor, ...]]] = {}
        self._adding = threading.Lock()
        self._added: tuple[int, list[Tensor]] | None = None

    def totals(self, replicas: Replicas, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sums of the gradients stored in a pass outside ``run``, like ``grads``.

        Raises:
            StrategyError: the pass has ``create_graph=True``, and there are several workers.
        """
        task = current_graph_task_id()
        arrived = self.arrived[task]
        columns = [arrived[r] for r in self.active if r in arrived]
        if not replicas.workers.is_multi_process:
            return [
                summed([column[i] for column in columns], grad.device)
                for i, grad in enumerate(grads)
            ]
        if torch.is_grad_enabled():
            raise StrategyError(
                "a backward pass with create_graph=True went through a collective, outside run; "
                "over several workers it cannot be differentiated again: call it inside run"
            )
        with self._adding:  # autograd has a thread for each GPU
            if self._added is None or self._added[0] != task:
                rows = zip(*columns, strict=True)
                own = [summed(row, row[0].device) for row in rows]
                self._added = (
                    task,
                    weighted_sum_over_workers(replicas, "the gradient of a collective", own),
                )
            _, totals = self._added
        return [total.to(grad.device) for total, grad in zip(totals, grads, strict=True)]


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
        tasks, task = end.state.arrived, current_graph_task_id()
        for earlier in [other for other in tasks if other != task]:
            del tasks[earlier]
        tasks.setdefault(task, {})[end.replica_id] = grads
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


def not_differentiable(result: Tensor, name: str) -> Tensor:
    """Returns ``result`` as a tensor through which a backward pass raises RuntimeError."""
    refusing: Tensor = _refusal(result, name, _anchor())
    return refusing


def _anchor() -> Tensor:
    return torch.zeros((), requires_grad=True)


# ``apply`` is untyped.
_exchange: Any = GradReduce.apply
_arrival: Any = GradSend.apply
_refusal: Any = NotDifferentiable.apply
