"""OptimizerRegistry: all optimizers over the mirrored parameters of one strategy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.replicas import Replicas, WeakReplicaMap
from mirror.execution.run import Run, SwappedOptimizer
from mirror.execution.runner import Runner
from mirror.replica.exactness.replica_checks import ComparePair, VisitValue
from mirror.replica.gradients.grad_access import GradAccess
from mirror.replica.optimizers.optimizer_state import ParamGroupSwap
from mirror.replica.optimizers.placements import CENTRAL, FIRST_REPLICA


class CapturesUpdates(Protocol):
    """Makes updates as recorded programs; see ``compiler/runtime/captured_update.py``."""

    def make(
        self,
        step: Callable[..., Any],
        owner: Optimizer,
        replica_id: int,
        optimizer: Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Makes an update of one replica; returns what the step returns."""

    def explain(self, owner: Optimizer, args: Any, kwargs: Any) -> None:
        """Reports why a step without updates of single replicas runs uncompiled."""


lone_capturers: list[weakref.ref[CapturesUpdates]] = []  # of strategies with one replica
_known: WeakReplicaMap[OptimizerRegistry] = WeakReplicaMap()
optimizers_of = _known.get


class OptimizerRegistry:
    """The optimizers over the mirrored parameters of one strategy.

    Attributes:
        gradients: the gradients of the mirrored parameters.
        placement: how a step that is made once reaches all replicas.
        lent: the optimizers that a step in progress, or one that has raised, uses.
        capturer: makes the updates, after ``strategy.compile(module)``.
    """

    def __init__(self, replicas: Replicas, runner: Runner, gradients: GradAccess) -> None:
        self.replicas = replicas
        self.runner = runner
        self.gradients = gradients
        self.placement = CENTRAL if replicas.has_parameter_device else FIRST_REPLICA
        self.lent: set[SwappedOptimizer] = set()
        self.capturer: CapturesUpdates | None = None
        # In the order of their creation.
        self._all: weakref.WeakKeyDictionary[ParamGroupSwap, None] = weakref.WeakKeyDictionary()
        _known.put(replicas, self)

    def part(self) -> LifecycleHooks:
        """Returns the hooks that keep optimizers equal between runs."""
        return LifecycleHooks(
            name="optimizers",
            prepare=WhilePending(self.lent, self._prepare),
            finish=Run.check_options,
            sync_idle=self._sync_idle,
            recover=self._recover,
        )

    def capture(self, capturer: CapturesUpdates) -> None:
        """Has updates made by ``capturer`` from now on; the caller keeps it alive."""
        self.capturer = capturer
        if not self.replicas.mirrors:
            lone_capturers.append(weakref.ref(capturer, lone_capturers.remove))

    def add(self, swap: ParamGroupSwap) -> None:
        """Registers an optimizer, for as long as its record lives."""
        self._all[swap] = None

    def optimizers(self) -> list[Optimizer]:
        """Returns all optimizers."""
        return [optimizer for _, optimizer in self._live()]

    def _live(self) -> list[tuple[ParamGroupSwap, Optimizer]]:
        """Returns the records of optimizers that live; without the GIL, some outlive theirs."""
        found = [(swap, swap.optimizer) for swap in tuple(self._all)]
        return [(swap, optimizer) for swap, optimizer in found if optimizer is not None]

    def bytes_of_replicas(self) -> tuple[int, ...]:
        """Returns the bytes of state that each replica holds, of all optimizers."""
        held = [swap.states.bytes_of_replicas() for swap, _ in self._live()]
        return tuple(map(sum, zip(*held, strict=True)))

    def check(self, compare: ComparePair) -> None:
        """Calls ``compare`` with the state of every replica and that of the first one."""
        for swap in self._swaps_to_read():
            swap.states.check(swap.parameters.variables, compare)

    def visit_first(self, visit: VisitValue) -> None:
        """Calls ``visit`` with the first replica's state of all optimizers."""
        for swap in self._swaps_to_read():
            swap.states.visit_first(swap.parameters.variables, visit)

    def _swaps_to_read(self) -> list[ParamGroupSwap]:
        """Returns the records of optimizers, with the state that the program may have changed."""
        for swap, optimizer in self._live():
            if not swap.states.is_scattered(optimizer):
                swap.refresh(only_first=True)
        return [swap for swap, _ in self._live()]

    def reduce(self) -> None:
        """Reduces the gradients for a step in the cross-replica context."""
        self.gradients.unreduced.flush()
        self.replicas.workers.num_steps += 1

    # Hooks

    def _prepare(self) -> None:
        if self.runner.running is None:
            self.runner.recover()  # a step in the cross-replica context has raised

    def _sync_idle(self, source: int, idle: Sequence[int]) -> None:
        for swap in tuple(self._all):
            swap.states.sync_idle(source, idle)

    def _recover(self) -> None:
        for lent in tuple(self.lent):  # the optimizer may have been freed since its step raised
            lent.force_out()
        for swap in tuple(self._all):
            swap.force_out()
            swap.states.follow_first()
