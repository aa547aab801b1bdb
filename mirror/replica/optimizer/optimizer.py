"""Optimizer steps over mirrored parameters, for any ``torch.optim.Optimizer``.

[Note: Lending an optimizer]
An optimizer holds the mirrored parameters; a step needs one replica's. Before a step torch calls
the global pre-hook, which lends the optimizer to a replica: ``param_groups`` and ``state`` become
that replica's, over ordinary parameters; the post-hook gives it back. In between it belongs to
this replica alone. A step that raises is given back at the replica's next merge or return, or
when its next step begins.

    context        what happens at optimizer.step()
    run            a merge: the gradients are reduced. Then each replica steps, in its turn; under
                   a schedule without turns none goes on before all have stepped, because what it
                   would find in ``param_groups`` may be lent to another
    cross-replica  the pre-hook steps replicas 1 .. N-1, then lends to replica 0, whose step is
                   the one that was called: hooks and schedulers see one step
    whole          with a closure (its forward spans all replicas), with hooks of the user's, of a
                   class that is not torch's, or where steps draw random numbers, a step in the
                   cross-replica context runs on the mirrored parameters, and the others take
                   over the result

Options in ``param_groups`` are shared: every replica gets a copy before the step, and what the
first one's step, or a hook of it, writes into its copy is kept. The first replica's state is the
optimizer's own.

[Note: One device, one step]
Replicas that share a device, the simulated ones above all, need not compute the same update N
times over: replica 0 steps, in the merge, or in the pre-hook outside ``run``; the others copy its
values, which takes a fifth of the time and keeps one state instead of N. The steps that were
called then find no parameter groups. Torch's optimizers cope with that, others may not: see
[Note: Whose step] in ``optimizer_steps.py``. The state of replicas 1 .. N-1 is copied from the
first one's when their code looks at it.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirror.compiler import Hold
from mirror.devices import random_state, set_random_state, using
from mirror.execution.current import current
from mirror.replica.optimizer.global_hooks import has_hooks
from mirror.replica.optimizer.groups import (
    Parameters,
    group_of_replica,
    refuse_what_is_not_mirrored,
)
from mirror.replica.optimizer.kept import kept_by
from mirror.replica.optimizer.making import Action, step_point
from mirror.replica.optimizer.options import Options, keep_options, options_of, refuse_different
from mirror.replica.optimizer.state import ReplicaStates
from mirror.replica.optimizer.steps import is_torchs_own, raw_step, refuse_draws

if TYPE_CHECKING:
    from mirror.execution.replicas import Replica
    from mirror.replica.group import ReplicaGroup

_NOBODY = -1  # who is lent no parameter groups
_BEFORE = "before a step"
_serials = itertools.count(1)


class OptimizerMirror:
    """One optimizer's state on every replica. See [Note: Lending an optimizer]."""

    def __init__(self, optimizer: Optimizer, group: ReplicaGroup) -> None:
        self.group = group
        self._optimizer = weakref.ref(optimizer)
        self._serial = next(_serials)
        self.parameters = Parameters(())
        self.states = ReplicaStates(group)
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        self._lent_groups: list[list[dict[str, Any]]] = [[] for _ in group.devices]
        self._lent_to: int | None = None
        self._is_whole = False  # whether the step in progress runs on the mirrored parameters
        self._met: set[int] = set()  # the replicas that step by turns
        self.steps_once = False  # whether a step has been seen to change what the optimizer keeps
        self._draws = False  # whether a step has been seen to draw random numbers
        self._random: Tensor | None = None  # the random state when a replica's step began
        self._alone = threading.Lock()  # held while lent
        # By thread, what the compiler had on it; a step that raises leaves that to its caller.
        self.holds: dict[int, Hold] = {}
        self.step: FrameType | None = None  # torch's call that the step in progress is
        group.optimizers.add(self)

    # Steps

    def step_here(self, step: FrameType, context: Replica, has_closure: bool) -> None:
        """Merges the replicas before their steps, and lends to the calling one."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if context.replica_id in self._met:
            self._lend(context.replica_id, step)
            context.lent.append(self)
            return
        if not self.parameters.are_mirrored:
            refuse_what_is_not_mirrored(optimizer)
        steps_once = self._steps_once(optimizer) and not has_closure

        def action(payloads: dict[int, Any]) -> dict[int, Any]:
            refuse_different(optimizer, payloads, _BEFORE)
            context.run.stepped.setdefault(self, {})
            self.group.gradients.settle(context.run.shares())
            self._is_whole = False  # one that was may have raised
            self._refresh(only_first=steps_once)
            if steps_once:
                self.parameters.bring_first_along(context.run.active)
                self._step_first(optimizer)
            return payloads

        self._merge(context, "optimizer.step", action, options_of(optimizer))
        if steps_once:
            self._lend_nothing(step)
        else:
            self._lend(context.replica_id, step)
        context.lent.append(self)

    def step_by_turns(self, step: Callable[..., Any], context: Replica) -> Any:
        """Has the first replica step, then the others, or follow. See [Note: Whose step]."""
        optimizer = self._optimizer()
        assert optimizer is not None
        leader, others = context.run.active[0], context.run.active[1:]

        def meet(payloads: dict[int, Any]) -> dict[int, Any]:
            refuse_different(optimizer, payloads, _BEFORE)
            context.run.stepped.setdefault(self, {})
            refuse_what_is_not_mirrored(optimizer)
            self.group.gradients.settle(context.run.shares())
            self._is_whole = False
            self._refresh()
            self._met = set(context.run.active)
            return payloads

        def follow(payloads: dict[int, Any]) -> dict[int, Any]:
            if payloads[leader][0]:
                self.steps_once = True
                self._take_over(leader, others)
            return dict.fromkeys(payloads, payloads[leader])

        self._merge(context, "optimizer.step", meet, options_of(optimizer))
        has_changed, result = False, None
        if context.replica_id == leader:
            kept = kept_by(optimizer)
            result = step(optimizer)
            has_changed = kept_by(optimizer) != kept
        outcome = (has_changed, result)
        has_changed, result = self._merge(context, "the first step", follow, outcome)
        if has_changed:
            self._met.discard(context.replica_id)
            return result
        if context.replica_id != leader:
            result = step(optimizer)
        self._met.discard(context.replica_id)
        self._end_together(context, options_of(optimizer))
        return result

    @torch.no_grad()
    def _take_over(self, leader: int, others: Sequence[int]) -> None:
        for variable in self.parameters.variables:
            variable.carry(leader, others)
            self.group.access.carry(variable, leader, others)
        self.states.take_over(leader, others)

    def _steps_once(self, optimizer: Optimizer) -> bool:
        """Whether one replica's step does for all. See [Note: One device, one step]."""
        return (
            self.group.is_one_device
            and not has_hooks(optimizer)
            and is_torchs_own(type(optimizer))
        )

    def _merge(self, context: Replica, what: str, action: Action, payload: Any = None) -> Any:
        point = step_point(self._optimizer(), self._serial, what, payload, action)
        return context.run.merge(context.replica_id, point)

    def _end_together(self, context: Replica, left: Options) -> None:
        """Has none go on before all have stepped, where it might find other groups than left.

        Under a schedule without turns these may be lent; what hooks have written to the first
        replica's is not there before that one has stepped.
        """
        optimizer = self._optimizer()
        assert optimizer is not None

        def keep(payloads: dict[int, Any]) -> dict[int, Any]:
            refuse_different(optimizer, payloads, "after a step")
            if 0 not in payloads:
                keep_options(self._groups, payloads[min(payloads)])
            return payloads

        if has_hooks(optimizer) or not context.run.lockstep.takes_turns:
            self._merge(context, "the end of optimizer.step", keep, left)

    def _step_first(self, optimizer: Optimizer) -> None:
        """Steps the first replica, and has the others take over. See [Note: One device...]."""
        self._lend_out(0, self._lent_groups[0], self.states.of(0), sys._getframe())
        try:
            with using(self.group.devices[0]):
                raw_step(type(optimizer))(optimizer)
        finally:
            self.give_back()
            self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        """Gives the other replicas, on the same device, what a step of the first one wrote."""
        moved, targets = self.parameters.variables, self.parameters.targets
        if [target for target in targets[0] if target.grad is None]:
            moved = [v for v in moved if v.targets[0].grad is not None or v.changed()]
            targets = list(zip(*[variable.targets for variable in moved], strict=True))
        for others in targets[1:]:
            torch._foreach_copy_(others, targets[0])
        for variable in moved:
            variable.version = variable.copies[0]._version
        self.states.follow_first()

    def step_everywhere(self, step: FrameType, args: Any, kwargs: Any, closure: Any) -> None:
        """Steps replicas 1 .. N-1 and lends to replica 0."""
        self.group.prepare()
        self.group.gradients.flush()
        is_own = is_torchs_own(type(args[0]))
        is_whole = closure is not None or self._draws or has_hooks(args[0]) or not is_own
        steps_once = self._steps_once(args[0])
        self._is_whole = is_whole
        self._refresh(only_first=is_whole or steps_once)
        if is_whole:
            self.step = step
            return
        if steps_once:
            self._step_first(args[0])
            self._lend_nothing(step)
            return
        function = raw_step(type(args[0]))
        for replica_id in range(1, self.group.num_replicas):
            self._lend(replica_id, step)
            try:
                with using(self.group.devices[replica_id]):
                    function(*args, **kwargs)
            except BaseException:
                self.group.recover()
                raise
            if self._has_drawn(replica_id):
                self._draw_once(replica_id, step)
                return
            self.give_back()
        self._lend(0, step)

    def _draw_once(self, replica_id: int, step: FrameType) -> None:
        """Undoes a step that drew random numbers: only the first replica may draw them."""
        assert self._random is not None
        set_random_state(self.group.devices[replica_id], self._random)
        self.group.recover()
        self._draws = self._is_whole = True
        self._refresh()
        self.step = step

    def _has_drawn(self, replica_id: int) -> bool:
        before = self._random
        return before is not None and not torch.equal(
            random_state(self.group.devices[replica_id]), before
        )

    def end_step(self) -> None:
        """Gives back after a step; outside ``run`` all replicas are now equal again."""
        if self._is_whole:
            self.step = None
            for variable in self.parameters.variables:
                variable.carry()
            self.states.shared.seen = True
            self._refresh(only_first=True)
            self._is_whole = False
            return
        replica: Any = current.replica
        if replica is not None and self in replica.lent:
            replica.lent.remove(self)
            drawn, left = self._has_drawn(replica.replica_id), self.options()
            self.give_back()
            if replica.replica_id not in self._met:
                self._end_together(replica, left)
            if drawn:
                refuse_draws()
            return
        was_lent = self._lent_to is not None
        self.give_back()
        if was_lent:
            for variable in self.parameters.variables:
                variable.version = variable.copies[0]._version

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
        optimizer = self._optimizer()
        if optimizer is None or not self.parameters.are_in(optimizer.param_groups):
            return False
        return self.group.access.clear(self.parameters.variables, self.parameters.targets)

    def is_within_step(self, frame: FrameType) -> bool:
        """Whether ``frame`` was called by the step in progress."""
        caller: FrameType | None = frame if self.step is not None else None
        while caller is not None and caller is not self.step:
            caller = caller.f_back
        return caller is not None

    def reclaim(self) -> None:
        """Takes back from a step of the same replica, or of the cross context, that raised."""
        replica: Any = current.replica
        if replica is not None and replica.group is self.group:
            if self in replica.lent:
                replica.lent.remove(self)
                self.give_back()
            return
        self._is_whole, self.step = False, None
        if self.group.running is None and self.is_lent:
            self.group.recover()

    def check(self, names: tuple[str, ...]) -> None:
        """Raises ReplicaMismatchError for state tensors that differ between replicas."""
        self._refresh(only_first=True)
        self.states.check(self.parameters.variables, names)

    @property
    def is_lent(self) -> bool:
        """Whether a step has the optimizer, or had it and raised."""
        return self._lent_to is not None

    def give_back(self) -> None:
        """Puts the shared groups and state back; idempotent."""
        optimizer = self._optimizer()
        self.step = None
        replica_id, self._lent_to = self._lent_to, None
        self.group.lent.discard(self)
        if replica_id is None or optimizer is None:
            return
        if replica_id == 0:
            self._keep_what_the_first_wrote()
        optimizer.param_groups = self._groups
        optimizer.state = self.states.shared
        self._alone.release()

    def _lend(self, replica_id: int, step: FrameType) -> None:
        self._lend_out(replica_id, self._lent_groups[replica_id], self.states.of(replica_id), step)
        self._random = random_state(self.group.devices[replica_id])

    def _lend_nothing(self, step: FrameType) -> None:
        """Lends no groups, for the steps of those who have been stepped."""
        self._lend_out(_NOBODY, [], {}, step)
        self._random = None

    def _lend_out(
        self,
        replica_id: int,
        groups: list[dict[str, Any]],
        state: dict[Any, Any],
        step: FrameType,
    ) -> None:
        self._alone.acquire()
        optimizer = self._optimizer()
        assert optimizer is not None
        self.step = step
        self._lent_to = replica_id
        self.group.lent.add(self)
        optimizer.param_groups = groups
        optimizer.state = state  # type: ignore[assignment]

    def _refresh(self, *, only_first: bool = False) -> None:
        """Brings the replicas' groups and state in line with the optimizer's own."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._groups = optimizer.param_groups
        for r in range(1 if only_first else self.group.num_replicas):
            self._lent_groups[r] = [group_of_replica(options, r) for options in self._groups]
        self.states.read(optimizer, is_whole=self._is_whole)
        if not only_first:
            self.states.catch_up()  # before the first one steps

    def _keep_what_the_first_wrote(self) -> None:
        keep_options(self._groups, self._lent_groups[0])
        self.states.publish_first()
