"""MirroredOptimizer: steps over mirrored parameters, for any ``torch.optim.Optimizer``.

A step needs one replica's parameters, and the optimizer holds the mirrored ones. So they are
swapped: [Note: Lending an optimizer] in ``optimizer_state.py``.

    context        what happens at optimizer.step()
    run            a merge, where the gradients are reduced. Then each replica steps, in its turn.
                   Without turns, all replicas wait until all have stepped: param_groups may have
                   another replica's groups swapped in
    cross-replica  replicas 1 .. N-1 step, then replica 0, which makes the step that was called:
                   a scheduler counts one step
    mirrored       in the cross-replica context, with a closure (its forward spans all replicas),
    parameters     with hooks of the user, or for a class that is not torch's: one step on the
                   mirrored parameters themselves; all replicas get the result

Replicas that share a device, such as simulated ones, need not compute the same update N times:
replica 0 steps, and the others copy its values. That takes a fifth of the time and keeps one state
instead of N. The steps that were called then find no parameter groups. Torch's optimizers accept
that, others may not: [Note: Step dispatch] in ``step_dispatch.py``. The state of replicas
1 .. N-1 is copied from the first one's when their code reads it.

``OptimizerRegistry`` has all optimizers over one strategy's parameters, and exchanges gradients
and values for their steps. ``CentralOptimizers`` replaces it with a parameter device:
``gradients/central_param.py``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirror.devices import using
from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.replicas import Replicas, WeakReplicaMap
from mirror.execution.run import Replica, Run, SwappedOptimizer, replica_of
from mirror.execution.runner import Runner
from mirror.replica.exactness.replica_checks import ComparePair, VisitValue
from mirror.replica.gradients.central_param import CentralAccess, CentralParam
from mirror.replica.gradients.grad_access import GradAccess
from mirror.replica.optimizers.merge_call_shared import (
    Action,
    average_loss_over_workers,
    step_point,
)
from mirror.replica.optimizers.optimizer_state import NO_REPLICA, ParamGroupSwap, ReplicaStates
from mirror.replica.optimizers.param_groups import (
    Options,
    ParamGroupsView,
    StepOnce,
    has_step_hooks,
    keep_options,
    options_of,
    refuse_different,
    refuse_unmirrored,
    step_hooks,
)
from mirror.replica.optimizers.step_dispatch import (
    extra_state_of,
    is_torchs_own,
    raw_step,
    step_without_draws,
)
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.replicated_params import mark_synced
from mirror.threads.user_frames import add_note

_known: WeakReplicaMap[OptimizerRegistry] = WeakReplicaMap()
optimizers_of = _known.get


class OptimizerOfReplicas(Protocol):
    """One optimizer over mirrored parameters, as the registry calls it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, while it lives."""

    def bytes_of_replicas(self) -> list[int]:
        """Returns the bytes of state that each replica holds."""

    def sync_idle(self, source: int, others: Sequence[int]) -> None:
        """Copies one replica's state to others."""

    def follow_first(self) -> None:
        """Swaps out, and makes the first replica's state that of all."""

    def check(self, compare: ComparePair) -> None:
        """Calls ``compare`` with the state of every replica and that of the first one."""

    def visit_first(self, visit: VisitValue) -> None:
        """Calls ``visit`` with the first replica's state."""


class OptimizerRegistry:
    """The optimizers over the mirrored parameters of one strategy.

    Attributes:
        gradients: the gradients of the mirrored parameters.
        lent: the optimizers that a step in progress, or one that has raised, uses.
    """

    def __init__(self, replicas: Replicas, runner: Runner, gradients: GradAccess) -> None:
        self.replicas = replicas
        self.runner = runner
        self.lent: set[SwappedOptimizer] = set()
        self.gradients = gradients
        # In the order of their creation.
        self._all: weakref.WeakKeyDictionary[OptimizerOfReplicas, None] = (
            weakref.WeakKeyDictionary()
        )
        _known.put(replicas, self)

    def part(self) -> LifecycleHooks:
        """Returns the hooks that keep optimizers equal between runs."""
        return LifecycleHooks(
            name="optimizers",
            prepare=WhilePending(self.lent, self._prepare),
            finish=_check_options,
            sync_idle=self._bring_along,
            recover=self._recover,
        )

    def add(self, optimizer: OptimizerOfReplicas) -> None:
        """Registers an optimizer, for as long as it lives."""
        self._all[optimizer] = None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns all optimizers."""
        found = [mirrored.optimizer for mirrored in tuple(self._all)]
        return [optimizer for optimizer in found if optimizer is not None]

    def bytes_of_replicas(self) -> tuple[int, ...]:
        """Returns the bytes of state that each replica holds, of all optimizers."""
        held = [optimizer.bytes_of_replicas() for optimizer in self._live_records()]
        return tuple(map(sum, zip(*held, strict=True)))

    def check(self, compare: ComparePair) -> None:
        """Calls ``compare`` with the state of every replica and that of the first one."""
        for optimizer in self._live_records():
            optimizer.check(compare)

    def visit_first(self, visit: VisitValue) -> None:
        """Calls ``visit`` with the first replica's state of all optimizers."""
        for optimizer in self._live_records():
            optimizer.visit_first(visit)

    def _live_records(self) -> list[OptimizerOfReplicas]:
        """Returns the records of optimizers that live; without the GIL, some outlive theirs."""
        return [mirrored for mirrored in tuple(self._all) if mirrored.optimizer is not None]

    # Gradients and values

    def reduce(self, run: Run | None = None) -> None:
        """Reduces the gradients for a step, in a run or in the cross-replica context."""
        if run is None:
            self.gradients.unreduced.flush()
        else:
            gradients = self.gradients.unreduced
            gradients.reduce_pending(gradients.shares_in(run))
            self.gradients.refuse_unequal(run)
        self.replicas.workers.num_steps += 1

    @torch.no_grad()
    def broadcast(
        self, variables: Iterable[ReplicatedParam], source: int, others: Sequence[int]
    ) -> None:
        """Copies one replica's values and gradients to others."""
        for variable in variables:
            variable.broadcast(source, others)
            self.gradients.broadcast(variable, source, others)

    # One step for all replicas

    def gather(self, parameters: ParamGroupsView, leader: int) -> None:
        """Copies the gradients that a step for all needs to an idle first replica."""
        if leader:
            # Its gradients are those of an earlier step: an idle replica does not clear them.
            self.broadcast(parameters.variables, leader, (0,))

    @torch.no_grad()
    def spread(self, parameters: ParamGroupsView) -> None:
        """Copies the values after the first replica's step to the others, on the same device."""
        moved, targets = parameters.variables, parameters.targets
        if [target for target in targets[0] if target.grad is None]:
            moved = [v for v in moved if v.targets[0].grad is not None or v.has_changed()]
            targets = list(zip(*[variable.targets for variable in moved], strict=True))
        for others in targets[1:]:
            torch._foreach_copy_(others, targets[0])
        mark_synced(moved)

    # Hooks

    def _prepare(self) -> None:
        if self.runner.running is None:
            self.runner.recover()  # a step in the cross-replica context has raised

    def _bring_along(self, source: int, idle: Sequence[int]) -> None:
        for optimizer in tuple(self._all):
            optimizer.sync_idle(source, idle)

    def _recover(self) -> None:
        for loan in tuple(self.lent):  # the optimizer may have been freed since its step raised
            loan.force_out()
        for optimizer in list(self._all):
            optimizer.follow_first()


def _check_options(run: Run) -> None:
    while run.stepped:
        optimizer, left = run.stepped.popitem()
        optimizer.check_left(left)


class CentralOptimizers(OptimizerRegistry):
    """The optimizers over parameters with a parameter device; they step once, there."""

    def __init__(self, replicas: Replicas, runner: Runner, gradients: CentralAccess) -> None:
        super().__init__(replicas, runner, gradients)
        self._access = gradients

    @torch.no_grad()
    def gather(self, parameters: ParamGroupsView, leader: int) -> None:
        """Copies gradients, and values that replicas have changed, to the parameter device."""
        for variable in cast("list[CentralParam]", parameters.variables):
            if variable.has_changed_in_run(leader):
                variable.take(leader)
            self._access.fetch(variable, leader)

    @torch.no_grad()
    def spread(self, parameters: ParamGroupsView) -> None:
        """Copies the values after a step from the parameter device to all replicas."""
        moved = [
            variable
            for variable in cast("list[CentralParam]", parameters.variables)
            if variable.home.grad is not None or variable.has_changed()
        ]
        homes: list[Tensor] = [variable.home for variable in moved]
        for r in range(self.replicas.num_replicas) if homes else ():
            torch._foreach_copy_([variable.targets[r] for variable in moved], homes)
        for variable in moved:
            variable.mark_equal()
        self._access.drop_unseen(parameters.variables)


_BEFORE = "before a step"
_PARTLY = (
    "this optimizer's step has begun and not ended: parameters and state may be partly updated, "
    "as on one device, and the same on all replicas; to go on from a whole step, load a checkpoint"
)
_AS_THE_FIRST = (
    "every replica makes this optimizer's step, and all are left with what the first one has: "
    "parameters and state are as after this step if that one has made it, else as before"
)
_serials = itertools.count(1)
Step = Callable[..., Any]


class MirroredOptimizer:
    """One optimizer over mirrored parameters.

    Attributes:
        serial: its number; replicas that step another one diverge.
        loan: swaps its groups and state for one replica's.
        states: its state on every replica.
        met: the replicas that have met, and step one after the other now.
        steps_once: whether a step has changed values of the optimizer outside its state.
    """

    states_kind: type[ReplicaStates] = ReplicaStates

    def __init__(self, optimizer: Optimizer, optimizers: OptimizerRegistry) -> None:
        self.replicas = optimizers.replicas
        self.runner = optimizers.runner
        self._optimizers, self._gradients = optimizers, optimizers.gradients
        self._optimizer = weakref.ref(optimizer)
        self.serial = next(_serials)
        self.states = self.states_kind(self.replicas)
        self.loan = ParamGroupSwap(
            optimizer, self.states, self.replicas.num_replicas, optimizers.lent
        )
        self.met: set[int] = set()
        self._left: dict[int, Options] = {}  # by replica, the options that its step has left
        self.steps_once = False
        step_hooks(optimizer)  # sets an attribute of the optimizer, before steps are compared
        optimizers.add(self)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, while it lives."""
        return self._optimizer()

    # Steps inside run

    def step_in_run(
        self, step: Step, optimizer: Optimizer, context: Replica, args: Any, kwargs: Any
    ) -> Any:
        """Merges the replicas before their steps, and makes that of the calling replica.

        Args:
            step: the class's step, with the hooks of torch around it.
        """
        loan = self.loan
        is_in_turn, has_hooks = context.replica_id in self.met, has_step_hooks(optimizer)
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                args, kwargs = _replace_closure(args, kwargs, StepOnce(closure()))
        # 1. All replicas meet: the gradients are reduced; one replica may step for all.
        steps_once = at_once = False
        if not is_in_turn:
            if not loan.parameters.are_mirrored:
                refuse_unmirrored(optimizer)
            by_itself = closure is not None and not self.replicas.has_parameter_device
            if self.replicas.steps_once and not (by_itself or has_hooks):
                steps_once = is_torchs_own(type(optimizer))
            if context.run.lockstep.is_eager and closure is None:
                at_once = not (steps_once or has_hooks) and is_torchs_own(type(optimizer))

            def action(payloads: dict[int, Any]) -> dict[int, Any]:
                self._meet(optimizer, context, payloads)
                loan.refresh(only_first=steps_once)
                if steps_once:
                    self._step_first(optimizer, context.run.active[0])
                elif at_once:
                    loan.swap_in_all()
                return payloads

            seen = options_of(optimizer)
            point = step_point(optimizer, self.serial, "optimizer.step", seen, action)
            context.run.merge(context.replica_id, point)
        if at_once:
            return self._step_clone(step, optimizer, context)
        # 2. The replica steps. A step that raises is ended by ``end_failed``.
        loan.swap_in(NO_REPLICA if steps_once else context.replica_id)
        context.lent.append(loan)
        result = step(optimizer, *args, **kwargs)
        loan.is_begun = False
        if has_hooks or not is_torchs_own(type(optimizer)):  # they may assign p.data
            loan.parameters.follow_targets(context.replica_id)
        context.lent.remove(loan)
        # 3. All replicas meet again, if one could see what another one's step leaves.
        left = None
        if has_hooks or not context.run.lockstep.takes_turns:
            left = self._left[context.replica_id] = options_of(optimizer)
        loan.swap_out()
        if left is not None and not is_in_turn:
            self._end_together(optimizer, context, left)
        return result

    def _step_clone(self, step: Step, optimizer: Optimizer, context: Replica) -> Any:
        """Makes the step of one of the replicas that step at once."""
        clone = self.loan.clone_of(context.replica_id)
        result = step(clone)
        self._end_together(optimizer, context, options_of(clone))
        return result

    def step_leader_first(
        self, step: Callable[[], Any], optimizer: Optimizer, context: Replica
    ) -> Any:
        """Makes the first replica's step, then the other ones', or copies its result to them.

        See [Note: Step dispatch].
        """
        leader, others = context.run.active[0], context.run.active[1:]

        def meet(payloads: dict[int, Any]) -> dict[int, Any]:
            refuse_unmirrored(optimizer)
            self._meet(optimizer, context, payloads)
            self.loan.refresh()
            self.met = set(context.run.active)
            return payloads

        def follow(payloads: dict[int, Any]) -> dict[int, Any]:
            if payloads[leader][0]:
                self.steps_once = True
                self._optimizers.broadcast(self.loan.parameters.variables, leader, others)
                self.states.sync_idle(leader, others)
            return dict.fromkeys(payloads, payloads[leader])

        self._merge(optimizer, context, "optimizer.step", meet, options_of(optimizer))
        has_changed, result = False, None
        if context.replica_id == leader:
            kept = extra_state_of(optimizer)
            result = step_without_draws(step, context.device)
            has_changed = extra_state_of(optimizer) != kept
        outcome = (has_changed, result)
        has_changed, result = self._merge(optimizer, context, "the first step", follow, outcome)
        if has_changed:
            self.met.discard(context.replica_id)
            return result
        if context.replica_id != leader:
            result = step_without_draws(step, context.device)
        self.met.discard(context.replica_id)
        if has_step_hooks(optimizer) or not context.run.lockstep.takes_turns:
            left = self._left.pop(context.replica_id, None) or options_of(optimizer)
            self._end_together(optimizer, context, left)
        return result

    def _meet(self, optimizer: Optimizer, context: Replica, seen: dict[int, Options]) -> None:
        refuse_different(optimizer, seen, _BEFORE)
        context.run.stepped.setdefault(self, {})
        if context.tracing is None:  # the tensors of a trace have no addresses
            for variable in self.loan.parameters.follow_copies(context.run.active):
                context.run.assigned[variable] = True
        self._optimizers.reduce(context.run)

    def _merge(
        self, optimizer: Optimizer, context: Replica, what: str, action: Action, payload: Any
    ) -> Any:
        point = step_point(optimizer, self.serial, what, payload, action)
        return context.run.merge(context.replica_id, point)

    def _end_together(self, optimizer: Optimizer, context: Replica, left: Options) -> None:
        """Merges the replicas after their steps, where one could read another one's groups.

        Without turns, another replica's groups may be swapped in. And the values that hooks write
        to the first replica's groups exist only after its step.
        """

        def keep(payloads: dict[int, Any]) -> dict[int, Any]:
            refuse_different(optimizer, payloads, "after a step")
            if self.loan.is_swapped_in:  # all replicas have stepped at once
                self.loan.is_begun = False
                self.loan.swap_out()
            if 0 not in payloads:
                keep_options(self.loan.groups, payloads[min(payloads)])
            return payloads

        self._merge(optimizer, context, "the end of optimizer.step", keep, left)

    # One step for all

    def _step_first(self, optimizer: Optimizer, leader: int) -> None:
        """Steps the first replica and copies the result to all."""
        self._optimizers.gather(self.loan.parameters, leader)
        try:
            self.loan.swap_in(0)
            with using(self.replicas.devices[0]):
                raw_step(type(optimizer))(optimizer)
            self.loan.is_begun = False
        finally:
            self.loan.swap_out()
            self._optimizers.spread(self.loan.parameters)
            self.states.follow_first()

    # Steps outside run

    def step_cross_replica(self, step: Step, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Steps replicas 1 .. N-1, then makes the called step as that of replica 0.

        With a closure or hooks, or if the class is not torch's, makes one step on the mirrored
        parameters instead.
        """
        self.runner.prepare("optimizer.step")
        self._optimizers.reduce()
        loan, closure = self.loan, args[0] if args else kwargs.get("closure")
        if closure is not None or has_step_hooks(optimizer) or not is_torchs_own(type(optimizer)):
            return self._step_mirrored_params(step, optimizer, args, kwargs, closure)
        steps_once = self.replicas.steps_once
        loan.refresh(only_first=steps_once)
        self.runner.unfinished = True
        if steps_once:
            self._step_first(optimizer, 0)
            loan.swap_in(NO_REPLICA)
        else:
            function = raw_step(type(optimizer))
            for replica_id in range(1, self.replicas.num_replicas):
                loan.swap_in(replica_id)
                with using(self.replicas.devices[replica_id]):
                    function(optimizer, *args, **kwargs)
                loan.swap_out()
            loan.swap_in(0)
        result = step(optimizer, *args, **kwargs)
        loan.is_begun = False
        loan.swap_out()
        mark_synced(loan.parameters.variables)
        self.runner.unfinished = self.runner.running is not None
        return result

    def _step_mirrored_params(
        self, step: Step, optimizer: Optimizer, args: Any, kwargs: Any, closure: Any
    ) -> Any:
        """Makes a step on the mirrored parameters, and copies its result to all replicas."""
        loan, workers = self.loan, self.replicas.workers
        if closure is not None and workers.is_multi_process:

            def whole() -> Any:
                return average_loss_over_workers(self.replicas, closure(), workers.weight)

            args, kwargs = _replace_closure(args, kwargs, whole)
        loan.refresh(only_first=True, is_whole=True)
        loan.is_begun = True
        result = step(optimizer, *args, **kwargs)
        loan.is_begun = False
        for variable in loan.parameters.variables:
            variable.broadcast()
        self.states.shared.seen = True
        loan.refresh(only_first=True, is_whole=True)
        return result

    # A step that has raised

    def recover(self) -> None:
        """Ends a step of the same replica, or of the cross-replica context, that has raised."""
        replica = replica_of(self.replicas)
        if replica is not None:
            if self.loan in replica.lent:
                replica.lent.remove(self.loan)
                self.loan.swap_out()
            return
        if self.runner.running is None and (self.loan.is_swapped_in or self.runner.unfinished):
            self.runner.recover()

    def end_failed(self, error: BaseException) -> None:
        """Ends a step that has raised; a note on the error says what the step may have left."""
        was_begun, self.loan.is_begun = self.loan.is_begun, False
        self.met.clear()
        replica = replica_of(self.replicas)
        own: Sequence[int] = range(self.replicas.num_replicas)
        if replica is not None:  # the tensors of a trace have no addresses
            own = (replica.replica_id,) if replica.tracing is None else ()
        for replica_id in own:  # as on one device, what the step has assigned stays
            self.loan.parameters.follow_targets(replica_id)
        if was_begun:
            add_note(error, _PARTLY)
        elif replica is not None and self.loan in replica.lent and replica.replica_id > 0:
            add_note(error, _AS_THE_FIRST)
        self.recover()

    # Between steps

    def options(self) -> Options:
        """Returns the options of the optimizer's groups, as the current replica sees them."""
        optimizer = self._optimizer()
        return [] if optimizer is None else options_of(optimizer)

    def check_left(self, left: dict[int, Options]) -> None:
        """Raises StrategyError if the replicas of a run have left different options."""
        optimizer = self._optimizer()
        if optimizer is not None and left:
            refuse_different(optimizer, left, "at the end of run")

    def clear_gradients(self) -> bool:
        """Drops the gradients of all parameters if none is pending; returns whether it did."""
        optimizer, parameters = self._optimizer(), self.loan.parameters
        if optimizer is None or not parameters.are_in(optimizer.param_groups):
            return False
        return self._gradients.clear(parameters.variables, parameters.targets)

    def bytes_of_replicas(self) -> list[int]:
        """Returns the bytes of state that each replica holds."""
        return self.states.bytes_of_replicas()

    def sync_idle(self, source: int, others: Sequence[int]) -> None:
        """Copies one replica's state to others."""
        self.states.sync_idle(source, others)

    def follow_first(self) -> None:
        """Swaps out, and makes the first replica's state that of all."""
        self.loan.force_out()
        self.states.follow_first()

    def check(self, compare: ComparePair) -> None:
        """Calls ``compare`` with the state of every replica and that of the first one."""
        self.loan.refresh(only_first=True)
        self.states.check(self.loan.parameters.variables, compare)

    def visit_first(self, visit: VisitValue) -> None:
        """Shows the first replica's state to ``visit``."""
        self.loan.refresh(only_first=True)
        self.states.visit_first(self.loan.parameters.variables, visit)


def _replace_closure(args: Any, kwargs: Any, closure: Any) -> tuple[Any, Any]:
    """Returns the arguments of a step with another closure."""
    return (closure, *args[1:]), {k: kwargs[k] for k in kwargs if k != "closure"}
