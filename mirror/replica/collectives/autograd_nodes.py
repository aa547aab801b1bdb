"""The autograd nodes of a collective, for backward passes inside and outside ``run``.

[Note: Gradients of collectives]
The outputs of a collective are part of one loss that the replicas have in common. Inside ``run``
each replica starts its own backward pass from its own loss, which counts with its weight w_r, so
SUM gives replica s the sum over r of (w_r / w_s) g_r; MEAN gives that over n. A backward pass
outside ``run`` starts from the common loss: plain SUM for SUM, MEAN for MEAN.

The graph is the same for both, two nodes per replica:

    x_r -> Exchange_r -> Arrival_r -> y_r           (the backward pass goes from right to left)

Inside ``run``, Arrival_r merges the replicas and has the result; Exchange_r passes it on. Outside,
one backward pass goes through all replicas in one thread, where nobody may wait: Arrival_r notes
its gradient, and Exchange_r, which must know the gradients of all, runs after every Arrival: the
engine takes ready nodes by descending sequence number, so Exchange_r gets one lower than every
other node's, and ascending from collective to collective. Then, when an Exchange runs, an Arrival
that has not run is not part of this backward pass, and its gradient is zero: had it been, it would
wait for a later collective's Exchange, which would have run first.

Where there are other workers, each makes that pass from its own loss, as a replica does inside
``run``: the first Exchange of a collective to run has the workers add up, weighted, what the
replicas of each have noted, and those after it take that. Exchanges run in the same order on all
workers, as their numbers are alike.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.base.torch_private import current_graph_task_id, sequence_number, set_sequence_number
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.errors import StrategyError
from mirror.execution.current_replica import replica_of
from mirror.execution.replicas import Replica
from mirror.replica.autograd_functions import make_common
from mirror.replica.collectives.over_workers import AllWorkersResult, weighted_over
from mirror.replica.collectives.reduce_ops import summed


class SequenceNumbers:
    """Hands out the sequence numbers of exchanges, below those of every other live node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: weakref.WeakSet[CollectiveState] = weakref.WeakSet()
        self._latest = 0
        self._is_in_use = False  # whether any has entered since there was none

    def enter(self, common: CollectiveState) -> int:
        """Returns a number above those of all collectives whose graphs still live."""
        with self._lock:
            self._latest = self._latest + 1 if len(self._live) else 0
            self._live.add(common)
            self._is_in_use = True
            return self._latest

    def advance(self, run: object = None) -> None:
        """Spends the thread's sequence numbers up to the latest exchange's; often none."""
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
    """What all replicas' nodes of one collective share.

    Attributes:
        active: the replicas that take part, of this worker.
        met: what is known of those of all workers.
        number: the sequence number of its exchanges.
        arrived: the gradients noted in a backward pass, by graph task and replica.
    """

    def __init__(self, active: Sequence[int], met: AllWorkersResult) -> None:
        self.active = tuple(active)
        self.met = met
        self.number = order.enter(self) if met.differentiable else 0
        self.arrived: dict[int, dict[int, tuple[Tensor, ...]]] = {}
        self._adding = threading.Lock()
        self._added: tuple[int, list[Tensor]] | None = None

    def totals(self, workers: LocalWorkerGroup, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sums of the gradients noted in a pass outside ``run``, like ``grads``."""
        task = current_graph_task_id()
        here = self.arrived[task]
        columns = [here[r] for r in self.active if r in here]
        if not workers.is_multi_process:
            return [
                summed([column[i] for column in columns], grad.device)
                for i, grad in enumerate(grads)
            ]
        if torch.is_grad_enabled():
            raise StrategyError(
                "a backward pass with create_graph=True went through a collective, outside run; "
                "over several workers it cannot be differentiated again: call it inside run"
            )
        with self._adding:  # each GPU has a thread in a backward pass
            if self._added is None or self._added[0] != task:
                rows = zip(*columns, strict=True)
                own = [summed(row, row[0].device) for row in rows]
                self._added = task, weighted_over(workers, "the gradient of a collective", own)
            _, totals = self._added
        return [total.to(grad.device) for total, grad in zip(totals, grads, strict=True)]


class CollectiveEnd:
    """One replica's side of a collective.

    Args:
        exchange: sums gradients over the replicas, weighted, inside ``run``.
        scale: what the summed gradients are multiplied with (MEAN).
        parts: for a gather, this replica's ``(axis, start, length)`` of each output.
    """

    def __init__(
        self,
        common: CollectiveState,
        replica: Replica,
        exchange: Callable[[Replica, Sequence[Tensor]], Sequence[Tensor]],
        *,
        scale: float = 1.0,
        parts: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        self.common = common
        self.replicas = replica.replicas
        self.replica_id = replica.replica_id
        self.exchange = exchange
        self.scale = scale
        self.parts = parts

    def connect(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the outputs as functions of the inputs; floating tensors only."""
        if not self.common.met.differentiable or not torch.is_grad_enabled() or not outputs:
            return outputs
        order.advance()
        # The anchor makes nodes also where no input of this replica requires a gradient: the
        # others' backward passes wait for this one.
        passed = _exchange(self, list(outputs), _anchor(), *inputs)
        set_sequence_number(passed[0].grad_fn, self.common.number)
        arrived: Sequence[Tensor] = _arrival(self, *passed)
        return arrived

    def current_replica(self) -> Replica | None:
        """Returns the replica whose thread this is, ``None`` outside ``run``."""
        return replica_of(self.replicas)


class GradReduce(torch.autograd.Function):
    """Outside ``run``: turns all replicas' gradients into this one's."""

    @staticmethod
    def forward(
        ctx: Any, joint: CollectiveEnd, outputs: list[Tensor], anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        make_common(ctx)
        ctx.joint = joint
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        joint: CollectiveEnd = ctx.joint
        if joint.current_replica() is None:
            grads = tuple(joint.common.totals(joint.replicas.workers, grads))
        if joint.scale != 1.0:
            grads = tuple(grad * joint.scale for grad in grads)
        if joint.parts is not None:
            grads = tuple(g.narrow(*part) for g, part in zip(grads, joint.parts, strict=True))
        return None, None, None, *grads


class GradSend(torch.autograd.Function):
    """Inside ``run``: merges the replicas' gradients. Outside: notes this replica's."""

    @staticmethod
    def forward(ctx: Any, joint: CollectiveEnd, *outputs: Tensor) -> tuple[Tensor, ...]:
        make_common(ctx)
        ctx.joint = joint
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        joint: CollectiveEnd = ctx.joint
        replica = joint.current_replica()
        if replica is not None:
            return None, *joint.exchange(replica, grads)
        tasks, task = joint.common.arrived, current_graph_task_id()
        for earlier in [known for known in tasks if known != task]:
            del tasks[earlier]
        tasks.setdefault(task, {})[joint.replica_id] = grads
        return None, *grads


class NotDifferentiable(torch.autograd.Function):
    """Refuses to be differentiated."""

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
