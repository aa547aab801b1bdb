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

Where one update serves all replicas (on one device, with a parameter device, with sharded state),
it is made once, in the merge or by the call outside ``run``: ``placements.py``. The state of
replicas 1 .. N-1 is copied from the first one's when their code reads it. After
``strategy.compile(module)``, ``OptimizerRegistry.capturer`` makes the updates of single replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from mirror.devices import using
from mirror.errors import StrategyError
from mirror.execution.run import Replica, Run, SteppedOptimizer, replica_of
from mirror.replica.optimizers.merge_call_shared import (
    INIT_FINISHED,
    Action,
    average_loss_over_workers,
)
from mirror.replica.optimizers.optimizer_registry import OptimizerRegistry
from mirror.replica.optimizers.optimizer_state import ParamGroupSwap, ReplicaStates
from mirror.replica.optimizers.optimizer_traits import (
    extra_state_of,
    has_torchs_step,
    is_torchs_own,
    raw_step,
    step_without_draws,
)
from mirror.replica.optimizers.param_groups import (
    Options,
    StepOnce,
    all_step_hooks,
    keep_options,
    options_of,
    refuse_different,
    refuse_unmirrored,
)
from mirror.replica.optimizers.placements import broadcast
from mirror.replica.optimizers.sharded_states import ShardedStates
from mirror.replica.optimizers.sharded_steps import ShardedSteps
from mirror.replica.params.replicated_params import mark_synced
from mirror.threads.merge_point import MergePoint
from mirror.threads.user_frames import add_note

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
        gradients: those of the strategy's parameters.
        serial: its number; replicas that step another one diverge.
        loan: swaps its groups and state for one replica's.
        states: its state on every replica.
        met: the replicas that have met, and step one after the other now.
        steps_once: whether a step has changed values of the optimizer outside its state.
        sharded: makes the steps of sharded state; ``None`` if state is not sharded.
    """

    def __init__(self, optimizer: Optimizer, optimizers: OptimizerRegistry) -> None:
        self.replicas = optimizers.replicas
        self.runner = optimizers.runner
        self._optimizers, self.gradients = optimizers, optimizers.gradients
        self.serial = next(_serials)
        states = ShardedStates(self.replicas) if self.replicas.shards_state else None
        self.states = ReplicaStates(self.replicas) if states is None else states
        self.loan = ParamGroupSwap(
            optimizer, self.states, self.replicas.num_replicas, optimizers.lent
        )
        self.sharded = None if states is None else ShardedSteps(optimizers, self.loan, states)
        self.met: set[int] = set()
        self._left: dict[int, Options] = {}  # by replica, the options that its step has left
        self.steps_once = False
        # Sets an attribute of the optimizer, before steps are compared.
        self._step_hooks = all_step_hooks(optimizer)
        optimizers.add(self.loan)

    # Steps inside run

    def step_in_run(
        self, step: Step, optimizer: Optimizer, context: Replica, args: Any, kwargs: Any
    ) -> Any:
        """Merges the replicas before their steps, and makes that of the calling replica.

        Args:
            step: the class's step, with the hooks of torch around it.
        """
        kind: Any = type(optimizer)
        loan, is_own = self.loan, has_torchs_step(kind, kind.step)
        is_in_turn, has_hooks = context.replica_id in self.met, any(self._step_hooks)
        closure = args[0] if args else kwargs.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = _replace_closure(args, kwargs, StepOnce(loss))
        # 1. All replicas meet: the gradients are reduced; one replica may step for all.
        steps_once = at_once = False
        if not is_in_turn:
            if not loan.parameters.are_mirrored:
                refuse_unmirrored(optimizer)
            by_itself = closure is not None and not self.replicas.has_parameter_device
            if self.replicas.steps_once and not (by_itself or has_hooks):
                steps_once = is_own
            if context.run.lockstep.is_eager and closure is None:
                at_once = is_own and not (steps_once or has_hooks)

            def action(payloads: dict[int, Any]) -> dict[int, Any]:
                self._begin_together(optimizer, context, payloads)
                loan.refresh(only_first=steps_once)
                if steps_once:
                    self._step_once(optimizer, context.run.active[0], args, kwargs)
                elif at_once:
                    loan.swap_in_all()
                return payloads

            self._merge(optimizer, context, "optimizer.step", action, options_of(optimizer))
        if steps_once:
            return loss
        if at_once:
            return self._step_clone(step, optimizer, context)
        # 2. The replica steps. A step that raises is ended by ``end_failed``.
        loan.swap_in(context.replica_id)
        context.lent.append(loan)
        if self._optimizers.capturer is not None:
            step = self._captured(step, optimizer, context.replica_id)
        result = step(optimizer, *args, **kwargs)
        loan.is_begun = False
        if has_hooks or not is_own:  # they may assign p.data
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
        if self._optimizers.capturer is not None:
            step = self._captured(step, optimizer, context.replica_id)
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
            self._begin_together(optimizer, context, payloads)
            self.loan.refresh()
            self.met = set(context.run.active)
            return payloads

        def follow(payloads: dict[int, Any]) -> dict[int, Any]:
            if payloads[leader][0]:
                self.steps_once = True
                broadcast(self.loan.parameters.variables, leader, others)
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
        if any(self._step_hooks) or not context.run.lockstep.takes_turns:
            left = self._left.pop(context.replica_id, None) or options_of(optimizer)
            self._end_together(optimizer, context, left)
        return result

    def _begin_together(
        self, optimizer: Optimizer, context: Replica, seen: dict[int, Options]
    ) -> None:
        """Reduces the gradients, in the merge before the replicas' steps.

        Args:
            seen: the options that the replicas have read.
        """
        refuse_different(optimizer, seen, "before a step")
        self.record_step(optimizer, context.run)
        if context.tracing is None:  # the tensors of a trace have no addresses
            for variable in self.loan.parameters.follow_copies(context.run.active):
                context.run.assigned[variable] = True
        self.gradients.unreduced.reduce_pending(context.run)
        if self.gradients.assigned:
            self.gradients.refuse_unequal(context.run)
        self.replicas.workers.num_steps += 1

    def _merge(
        self, optimizer: Optimizer, context: Replica, what: str, action: Action, payload: Any
    ) -> Any:
        """Merges the replicas of a run, which must all step the same optimizer.

        Optimizers that are created inside ``run`` may have any order, so their serial number does
        not count.
        """
        kind = type(optimizer).__name__
        if INIT_FINISHED not in vars(optimizer):
            point = MergePoint(what, (f"{kind} #{self.serial}",), payload, action)
            return context.run.merge(context.replica_id, point)

        def act_on_one(payloads: dict[int, Any]) -> dict[int, Any]:
            if any(other is not optimizer for other, _ in payloads.values()):
                raise StrategyError(
                    f"every replica has made a {kind} of its own inside strategy.run, over "
                    "parameters that all share; make optimizers outside run"
                )
            return action({r: theirs for r, (_, theirs) in payloads.items()})

        point = MergePoint(what, (kind,), (optimizer, payload), act_on_one)
        return context.run.merge(context.replica_id, point)

    def record_step(self, optimizer: Optimizer, run: Run) -> None:
        """Has the options that the replicas leave compared at the end of a run."""
        if self not in run.stepped:
            check = partial(refuse_different, optimizer, when="at the end of run")
            run.stepped[self] = SteppedOptimizer(partial(options_of, optimizer), check, {})

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

    def _captured(self, step: Step, optimizer: Optimizer, replica_id: int) -> Step:
        """Returns what makes a replica's update in place of ``step``: recorded, if it can be."""
        assert self._optimizers.capturer is not None
        return partial(self._optimizers.capturer.make, step, optimizer, replica_id)

    # One step for all

    def _step_once(self, optimizer: Optimizer, leader: int, args: Any, kwargs: Any) -> None:
        """Makes the update for all replicas, where the placement has the first one's state."""
        gather, publish = self._optimizers.placement
        exposed, parameters = self.gradients.exposed, self.loan.parameters
        gather(exposed, parameters, leader)
        try:
            self.loan.swap_in(0)
            is_on_cpu = self.replicas.are_simulated  # which needs no device context
            with nullcontext() if is_on_cpu else using(self.replicas.devices[0]):
                function = raw_step(type(optimizer).step)
                if self._optimizers.capturer is not None:
                    function = self._captured(function, optimizer, 0)
                function(optimizer, *args, **kwargs)
            self.loan.is_begun = False
        finally:
            self.loan.swap_out()
            publish(exposed, parameters)
            self.states.follow_first()

    # Steps outside run

    def step_cross_replica(self, step: Step, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Steps replicas 1 .. N-1, then makes the called step as that of replica 0; or steps once.

        With a closure or hooks, or if the class is not torch's, makes one step on the mirrored
        parameters instead.
        """
        if self.sharded is not None and self.sharded.can_step(optimizer):
            return self.sharded.step_with_hooks(optimizer, args, kwargs)
        self.runner.prepare("optimizer.step")
        self._optimizers.reduce()
        capturer = self._optimizers.capturer
        loan, closure = self.loan, args[0] if args else kwargs.get("closure")
        if closure is not None or any(self._step_hooks) or not is_torchs_own(type(optimizer)):
            if capturer is not None:
                capturer.explain(optimizer, args, kwargs)
            return self._step_mirrored_params(step, optimizer, args, kwargs, closure)
        steps_once, result = self.replicas.steps_once, None
        loan.refresh(only_first=steps_once)
        self.runner.unfinished = True
        if steps_once:
            self._step_once(optimizer, 0, args, kwargs)
        else:
            function = raw_step(type(optimizer).step)
            for replica_id in range(1, self.replicas.num_replicas):
                update = function
                if capturer is not None:
                    update = self._captured(function, optimizer, replica_id)
                loan.swap_in(replica_id)
                with using(self.replicas.devices[replica_id]):
                    update(optimizer, *args, **kwargs)
                loan.swap_out()
            loan.swap_in(0)
            if capturer is not None:
                step = self._captured(step, optimizer, 0)
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
        if closure is not None and workers.is_multi_process and self.runner.running is None:

            def whole() -> Any:  # inside ``run`` the closure returns it
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


def _replace_closure(args: Any, kwargs: Any, closure: Any) -> tuple[Any, Any]:
    """Returns the arguments of a step with another closure."""
    return (closure, *args[1:]), {k: kwargs[k] for k in kwargs if k != "closure"}
