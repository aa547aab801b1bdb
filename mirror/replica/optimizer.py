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
    whole          with a closure (its forward spans all replicas), with hooks of the user's, or
                   where steps draw random numbers, a step in the cross-replica context runs on
                   the mirrored parameters, and the others take over the result

Options in ``param_groups`` are shared: every replica gets a copy before the step, and what the
first one's step writes into its copy is kept. The first replica's state is the optimizer's own.

[Note: One device, one step]
Replicas that share a device, the simulated ones above all, need not compute the same update N
times over: replica 0 steps, in the merge, or in the pre-hook outside ``run``; the others copy its
values, which takes a fifth of the time and keeps one state instead of N. The steps that were
called then find no parameter groups. Torch's optimizers cope with that, others may not: those step
on every replica. The state of replicas 1 .. N-1 is copied from the first one's when
their code looks at it.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mirror.context import current
from mirror.devices import random_state, set_random_state, using
from mirror.errors import StrategyError
from mirror.replica.compiler import Hold, let_go, letting_go, not_compiled, take_hold
from mirror.replica.merge_point import MergePoint
from mirror.replica.nesting import refuse_within_another
from mirror.replica.optimizer_groups import (
    Once,
    Parameters,
    has_hooks,
    mirrored_group,
    of_replica,
    raw_step,
)
from mirror.replica.optimizer_state import ReplicaStates
from mirror.replica.parameters import MirroredParameter
from mirror.replica.plain import note_step
from mirror.replica.zero_grad import watch_zero_grad

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup
    from mirror.replica.run import ReplicaContext

Action = Callable[[dict[int, Any]], dict[int, Any]]

_NOBODY = -1  # who is lent no parameter groups
_serials = itertools.count(1)
_watching = threading.Lock()
_hooks: list[Any] = []


def watch_optimizer_steps() -> None:
    """Installs the global hooks, once."""
    with _watching:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))
            watch_zero_grad()
            # Both hooks must see one frame, which the compiler would break up.
            not_compiled(Optimizer.profile_hook_step(lambda self: None))  # they share their code


@letting_go
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    mirror: OptimizerMirror | None = optimizer.__dict__.get("_mirror")
    step = sys._getframe(1)
    if mirror is not None:
        if mirror.is_within_step(step):
            return None  # a subclass's step has called its base's
        mirror.reclaim()
    if mirror is None or not mirror.parameters.are_in(optimizer.param_groups):
        group = mirrored_group(optimizer)
        if group is None:
            note_step(optimizer)
            return None
        mirror = _mirror_of(optimizer, group)
    group = mirror.group
    group.check_usable()
    refuse_within_another(group, "optimizer.step")
    replica: Any = current.replica
    mirror.holds[threading.get_ident()] = let_go()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if replica is None or replica.group is not group:
        mirror.step_everywhere(step, args, kwargs, closure)
        return None
    if closure is not None:
        with torch.enable_grad():
            once = Once(closure())
        args, kwargs = (args[0], once, *args[2:]), {k: kwargs[k] for k in kwargs if k != "closure"}
    mirror.step_here(step, replica, closure is not None)
    return args, kwargs


def _mirror_of(optimizer: Optimizer, group: ReplicaGroup) -> OptimizerMirror:
    with _watching:  # replicas that run at once come here at once
        mirror: OptimizerMirror | None = optimizer.__dict__.get("_mirror")
        if mirror is None or mirror.group is not group:
            # There it goes with the optimizer; its copies and pickles leave it out.
            mirror = optimizer.__dict__["_mirror"] = OptimizerMirror(optimizer, group)
        mirror.parameters = Parameters(optimizer.param_groups)
        return mirror


@letting_go
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    mirror: OptimizerMirror | None = optimizer.__dict__.get("_mirror")
    if mirror is not None and mirror.step is sys._getframe(1):
        try:
            mirror.end_step()
        finally:
            take_hold(mirror.holds.pop(threading.get_ident(), None))


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
        self._draws = False  # whether a step has been seen to draw random numbers
        self._random: Tensor | None = None  # the random state when a replica's step began
        self._alone = threading.Lock()  # held while lent
        # By thread, what the compiler had on it; a step that raises leaves that to its caller.
        self.holds: dict[int, Hold] = {}
        self.step: FrameType | None = None  # torch's call that the step in progress is
        group.optimizers.add(self)

    # Steps

    def step_here(self, step: FrameType, context: ReplicaContext, has_closure: bool) -> None:
        """Merges the replicas before their steps, and lends to the calling one."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if not self.parameters.are_mirrored:
            self._refuse_what_is_not_mirrored(optimizer)
        steps_once = self._steps_once(optimizer) and not has_closure

        def action(payloads: dict[int, None]) -> dict[int, None]:
            self.group.gradients.settle(context.run.shares())
            self._refresh(only_first=steps_once)
            if steps_once:
                self._step_first(optimizer)
            return payloads

        self._merge(context, "optimizer.step", action)
        if steps_once:
            self._lend_nothing(step)
        else:
            self._lend(context.replica_id, step)
        context.lent.append(self)

    def _steps_once(self, optimizer: Optimizer) -> bool:
        """Whether one replica's step does for all. See [Note: One device, one step]."""
        return (
            self.group.is_one_device
            and not has_hooks(optimizer)
            and type(optimizer).__module__.startswith("torch.optim.")
        )

    def _merge(self, context: ReplicaContext, what: str, action: Action) -> None:
        name = f"{type(self._optimizer()).__name__} #{self._serial}"
        context.run.merge(context.replica_id, MergePoint(what, (name,), None, action))

    def _step_first(self, optimizer: Optimizer) -> None:
        """Steps the first replica, and has the others take over. See [Note: One device...]."""
        self._lend_out(0, self._lent_groups[0], self.states.of(0), sys._getframe())
        try:
            with using(self.group.devices[0]):
                raw_step(optimizer)(optimizer)
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

    def _refuse_what_is_not_mirrored(self, optimizer: Optimizer) -> None:
        for i, options in enumerate(optimizer.param_groups):
            for parameter in options["params"]:
                if not isinstance(parameter, MirroredParameter) and parameter.requires_grad:
                    raise StrategyError(
                        f"parameter group {i} has a parameter of shape {tuple(parameter.shape)} "
                        "that no mirrored module holds: its gradient would not be reduced; put it "
                        "into a mirrored module, or step outside strategy.run"
                    )

    def step_everywhere(self, step: FrameType, args: Any, kwargs: Any, closure: Any) -> None:
        """Steps replicas 1 .. N-1 and lends to replica 0."""
        self.group.prepare()
        self.group.gradients.flush()
        is_whole = closure is not None or self._draws or has_hooks(args[0])
        steps_once = self._steps_once(args[0])
        self._refresh(only_first=is_whole or steps_once)
        if is_whole:
            self._is_whole, self.step = True, step
            return
        if steps_once:
            self._step_first(args[0])
            self._lend_nothing(step)
            return
        function = raw_step(args[0])
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
        self._refresh()
        self._draws = self._is_whole = True
        self.step = step

    def _has_drawn(self, replica_id: int) -> bool:
        before = self._random
        return before is not None and not torch.equal(
            random_state(self.group.devices[replica_id]), before
        )

    def end_step(self) -> None:
        """Gives back after a step; outside ``run`` all replicas are now equal again."""
        if self._is_whole:
            self._is_whole, self.step = False, None
            for variable in self.parameters.variables:
                variable.carry()
            self.states.shared.seen = True
            self._refresh(only_first=True)
            return
        replica: Any = current.replica
        if replica is not None and self in replica.lent:
            replica.lent.remove(self)
            drawn = self._has_drawn(replica.replica_id)
            self.give_back()
            if not replica.run.lockstep.takes_turns:
                self._merge(replica, "the end of optimizer.step", lambda payloads: payloads)
            if drawn:
                raise StrategyError(
                    "this optimizer's step draws random numbers, of which every replica would "
                    "draw its own; call step outside strategy.run"
                )
            return
        was_lent = self._lent_to is not None
        self.give_back()
        if was_lent:
            for variable in self.parameters.variables:
                variable.version = variable.copies[0]._version

    def clear_gradients(self) -> bool:
        """Drops the gradients of all parameters, if none is pending; returns whether it did."""
        optimizer = self._optimizer()
        if optimizer is None or not self.parameters.are_in(optimizer.param_groups):
            return False
        return self.group.gradients.clear(self.parameters)

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
        optimizer.param_groups = groups
        optimizer.state = state  # type: ignore[assignment]

    def _refresh(self, *, only_first: bool = False) -> None:
        """Brings the replicas' groups and state in line with the optimizer's own."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._groups = optimizer.param_groups
        for r in range(1 if only_first else self.group.num_replicas):
            self._lent_groups[r] = [
                {**options, "params": of_replica(options["params"], r)} for options in self._groups
            ]
        self.states.read(optimizer)
        if not only_first:
            self.states.catch_up()  # before the first one steps

    def _keep_what_the_first_wrote(self) -> None:
        for options, lent in zip(self._groups, self._lent_groups[0], strict=True):
            for key, value in lent.items():
                if key != "params" and options.get(key, options) is not value:
                    options[key] = value
        self.states.publish_first()
