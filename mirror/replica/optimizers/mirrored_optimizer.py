"""Optimizer steps over mirrored parameters, for any ``torch.optim.Optimizer``.

[Note: Steps]
A step needs one replica's parameters, and the optimizer holds the mirrored ones: it is lent, see
[Note: Lending an optimizer] in ``loan.py``.

    context        what happens at optimizer.step()
    run            a merge: the gradients are reduced. Then each replica steps, in its turn; under
                   a schedule without turns none goes on before all have stepped, because what it
                   would find in ``param_groups`` may be lent to another
    cross-replica  the pre-hook steps replicas 1 .. N-1, then lends to replica 0, whose step is
                   the one that was called: schedulers see one step
    whole          with a closure (its forward spans all replicas), with hooks of the user's, or of
                   a class that is not torch's, a step in the cross-replica context runs on the
                   mirrored parameters, and the others take over the result

[Note: One device, one step]
Replicas that share a device, the simulated ones above all, need not compute the same update N
times over: replica 0 steps, in the merge, or in the pre-hook outside ``run``; the others copy its
values, which takes a fifth of the time and keeps one state instead of N. The steps that were
called then find no parameter groups. Torch's optimizers cope with that, others may not: see
[Note: Whose step] in ``steps.py``. The state of replicas 1 .. N-1 is copied from the first one's
when their code looks at it.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from mirror.base.dynamo import DynamoCallback
from mirror.devices import using
from mirror.execution.current_replica import replica_of
from mirror.execution.replicas import Replica
from mirror.replica.optimizers.created_in_run import Action, step_point
from mirror.replica.optimizers.global_hooks import has_hooks
from mirror.replica.optimizers.group_options import (
    Options,
    keep_options,
    options_of,
    refuse_different,
)
from mirror.replica.optimizers.optimizer_registry import OptimizerRegistry
from mirror.replica.optimizers.optimizer_state import ReplicaStates
from mirror.replica.optimizers.param_groups import refuse_what_is_not_mirrored
from mirror.replica.optimizers.param_swap import ParamGroupSwap
from mirror.replica.optimizers.step_dispatch import (
    is_torchs_own,
    kept_by,
    raw_step,
    refusing_draws,
)
from mirror.replica.params.replicated_params import mark_synced
from mirror.replica.replica_checks import ComparePair, VisitValue
from mirror.threads.user_frames import add_note

_BEFORE = "before a step"
_PARTLY = (
    "this optimizer's step has begun and not ended: parameters and state may be partly updated, "
    "as on one device, alike on all replicas; to go on from a whole step, load a checkpoint"
)
_AS_THE_FIRST = (
    "every replica makes this optimizer's step, and all are left with what the first one has: "
    "parameters and state are as after this step if that one has made it, else as before"
)
_serials = itertools.count(1)


class MirroredOptimizer:
    """One optimizer over mirrored parameters. See [Note: Steps].

    Attributes:
        loan: who has its groups and state.
        states: its state on every replica.
        steps_once: whether a step has been seen to change what the optimizer keeps.
        holds: by thread, what the compiler had on it; a step that raises leaves that to its
            caller.
    """

    def __init__(self, optimizer: Optimizer, optimizers: OptimizerRegistry) -> None:
        self.replicas = optimizers.replicas
        self.runner = optimizers.runner
        self._optimizers = optimizers
        self._optimizer = weakref.ref(optimizer)
        self._serial = next(_serials)
        self.states = ReplicaStates(self.replicas)
        self.loan = ParamGroupSwap(
            optimizer, self.states, self.replicas.num_replicas, optimizers.lent
        )
        self._on_mirrored_params = (
            False  # whether the step in progress runs on the mirrored parameters
        )
        self._met: set[int] = set()  # the replicas that step by turns
        self.steps_once = False
        self.holds: dict[int, DynamoCallback] = {}
        optimizers.add(self)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, while it lives."""
        return self._optimizer()

    # Steps inside run

    def step_in_run(self, step: FrameType, context: Replica, has_closure: bool) -> None:
        """Merges the replicas before their steps, and lends to the calling one."""
        optimizer, loan = self.loan.optimizer, self.loan
        if context.replica_id in self._met:
            loan.swap_in(context.replica_id, step)
            context.lent.append(loan)
            return
        if not loan.parameters.are_mirrored:
            refuse_what_is_not_mirrored(optimizer)
        by_itself = has_closure and not self.replicas.has_parameter_device
        steps_once = self._steps_once(optimizer) and not by_itself

        def action(payloads: dict[int, Any]) -> dict[int, Any]:
            self._meet(context, payloads)
            loan.refresh(only_first=steps_once)
            if steps_once:
                self._step_first(optimizer, context.run.active[0])
            return payloads

        self._merge(context, "optimizer.step", action, options_of(optimizer))
        if steps_once:
            loan.swap_in_nothing(step)
        else:
            loan.swap_in(context.replica_id, step)
        context.lent.append(loan)

    def step_leader_first(self, step: Callable[..., Any], context: Replica) -> Any:
        """Has the first replica step, then the others, or follow. See [Note: Whose step]."""
        optimizer = self.loan.optimizer
        leader, others = context.run.active[0], context.run.active[1:]

        def meet(payloads: dict[int, Any]) -> dict[int, Any]:
            refuse_what_is_not_mirrored(optimizer)
            self._meet(context, payloads)
            self.loan.refresh()
            self._met = set(context.run.active)
            return payloads

        def follow(payloads: dict[int, Any]) -> dict[int, Any]:
            if payloads[leader][0]:
                self.steps_once = True
                self._optimizers.broadcast(self.loan.parameters.variables, leader, others)
                self.states.sync_idle(leader, others)
            return dict.fromkeys(payloads, payloads[leader])

        def drawless() -> Any:
            return refusing_draws(lambda: step(optimizer), context.device)

        self._merge(context, "optimizer.step", meet, options_of(optimizer))
        has_changed, result = False, None
        if context.replica_id == leader:
            kept = kept_by(optimizer)
            result = drawless()
            has_changed = kept_by(optimizer) != kept
        outcome = (has_changed, result)
        has_changed, result = self._merge(context, "the first step", follow, outcome)
        if has_changed:
            self._met.discard(context.replica_id)
            return result
        if context.replica_id != leader:
            result = drawless()
        self._met.discard(context.replica_id)
        self._end_together(context, options_of(optimizer))
        return result

    def _meet(self, context: Replica, seen: dict[int, Options]) -> None:
        refuse_different(self.loan.optimizer, seen, _BEFORE)
        context.run.stepped.setdefault(self, {})
        self._optimizers.reduce(context.run)
        self._on_mirrored_params = False  # one that was may have raised

    def _merge(self, context: Replica, what: str, action: Action, payload: Any) -> Any:
        point = step_point(self.loan.optimizer, self._serial, what, payload, action)
        return context.run.merge(context.replica_id, point)

    def _end_together(self, context: Replica, left: Options) -> None:
        """Has none go on before all have stepped, where it might find other groups than left.

        Under a schedule without turns these may be lent; what hooks have written to the first
        replica's is not there before that one has stepped.
        """
        optimizer = self.loan.optimizer

        def keep(payloads: dict[int, Any]) -> dict[int, Any]:
            refuse_different(optimizer, payloads, "after a step")
            if 0 not in payloads:
                keep_options(self.loan.groups, payloads[min(payloads)])
            return payloads

        if has_hooks(optimizer) or not context.run.lockstep.takes_turns:
            self._merge(context, "the end of optimizer.step", keep, left)

    # One step for all

    def _steps_once(self, optimizer: Optimizer) -> bool:
        """Whether one replica's step does for all. See [Note: One device, one step]."""
        return (
            self.replicas.steps_once
            and not has_hooks(optimizer)
            and is_torchs_own(type(optimizer))
        )

    def _step_first(self, optimizer: Optimizer, leader: int) -> None:
        """Steps the first replica, and has the others take over. See [Note: One device...]."""
        self._optimizers.gather(self.loan.parameters, leader)
        try:
            self.loan.swap_in(0, sys._getframe())
            with using(self.replicas.devices[0]):
                raw_step(type(optimizer))(optimizer)
            self.loan.is_begun = False
        finally:
            self.loan.swap_out()
            self._optimizers.spread(self.loan.parameters)
            self.states.follow_first()

    # Steps outside run

    def step_cross_replica(self, step: FrameType, args: Any, kwargs: Any, closure: Any) -> None:
        """Steps replicas 1 .. N-1 and lends to replica 0."""
        self.runner.prepare("optimizer.step")
        self._optimizers.reduce()
        optimizer, loan = args[0], self.loan
        is_own = is_torchs_own(type(optimizer))
        self._on_mirrored_params = closure is not None or has_hooks(optimizer) or not is_own
        steps_once = self._steps_once(optimizer)
        loan.refresh(
            only_first=self._on_mirrored_params or steps_once, is_whole=self._on_mirrored_params
        )
        if self._on_mirrored_params:
            loan.step, loan.is_begun = step, True
            return
        self.runner.unfinished = True
        if steps_once:
            self._step_first(optimizer, 0)
            loan.swap_in_nothing(step)
            return
        function = raw_step(type(optimizer))
        for replica_id in range(1, self.replicas.num_replicas):
            loan.swap_in(replica_id, step)
            with using(self.replicas.devices[replica_id]):
                function(*args, **kwargs)
            loan.swap_out()
        loan.swap_in(0, step)

    # The end of a step, regular or not

    def end_step(self) -> None:
        """Gives back after a step; outside ``run`` all replicas are now equal again."""
        self.loan.is_begun = False
        if self._on_mirrored_params:
            self._end_whole()
            return
        replica = replica_of(self.replicas)
        if replica is not None and self.loan in replica.lent:
            replica.lent.remove(self.loan)
            left = self.options()
            self.loan.swap_out()
            if replica.replica_id not in self._met:
                self._end_together(replica, left)
            return
        was_lent = self.loan.is_swapped_in
        self.loan.swap_out()
        if was_lent:
            mark_synced(self.loan.parameters.variables)
        self.runner.unfinished = self.runner.running is not None

    def _end_whole(self) -> None:
        self.loan.step = None
        for variable in self.loan.parameters.variables:
            variable.broadcast()
        self.states.shared.seen = True
        self.loan.refresh(only_first=True, is_whole=True)
        self._on_mirrored_params = False

    def recover(self) -> None:
        """Takes back from a step of the same replica, or of the cross context, that raised."""
        replica = replica_of(self.replicas)
        if replica is not None:
            if self.loan in replica.lent:
                replica.lent.remove(self.loan)
                self.loan.swap_out()
            return
        self._on_mirrored_params, self.loan.step = False, None
        if self.runner.running is None and (self.loan.is_swapped_in or self.runner.unfinished):
            self.runner.recover()

    def end_failed(self, error: BaseException) -> None:
        """Takes back from a step that has raised; notes on the error what that may have left."""
        was_begun, self.loan.is_begun = self.loan.is_begun, False
        replica = replica_of(self.replicas)
        if was_begun:
            add_note(error, _PARTLY)
        elif replica is not None and self.loan in replica.lent and replica.replica_id > 0:
            add_note(error, _AS_THE_FIRST)
        self.recover()

    # What it is asked between steps

    def options(self) -> Options:
        """Returns the options of the optimizer's groups, as the current replica has left them."""
        optimizer = self._optimizer()
        return [] if optimizer is None else options_of(optimizer)

    def check_left(self, left: dict[int, Options]) -> None:
        """Raises StrategyError if the replicas of a run have left different options."""
        optimizer = self._optimizer()
        if optimizer is not None and left:
            refuse_different(optimizer, left, "at the end of run")

    def clear_gradients(self) -> bool:
        """Drops the gradients of all parameters, if none is pending; returns whether it did."""
        optimizer, parameters = self._optimizer(), self.loan.parameters
        if optimizer is None or not parameters.are_in(optimizer.param_groups):
            return False
        return self._optimizers.clear(parameters)

    def sync_idle(self, source: int, others: Sequence[int]) -> None:
        """Gives one replica's state to others."""
        self.states.sync_idle(source, others)

    def follow_first(self) -> None:
        """Takes the optimizer back, and makes the first replica's state that of all."""
        self.loan.force_out()
        self.states.follow_first()

    def check(self, look: ComparePair) -> None:
        """Shows the state of every replica to ``look``, beside that of the first."""
        self.loan.refresh(only_first=True)
        self.states.check(self.loan.parameters.variables, look)

    def show_first(self, see: VisitValue) -> None:
        """Shows the first replica's state to ``see``."""
        self.loan.refresh(only_first=True)
        self.states.show_first(self.loan.parameters.variables, see)
