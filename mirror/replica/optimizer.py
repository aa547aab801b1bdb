"""Optimizer steps over mirrored parameters, for any ``torch.optim.Optimizer``.

[Note: Lending an optimizer]
An optimizer holds the mirrored parameters; a step needs one replica's. Before a step torch calls
the global pre-hook, which lends the optimizer to a replica: ``param_groups`` and ``state`` become
that replica's, over ordinary parameters; the post-hook gives it back. In between it belongs to
this replica alone. A step that raises is given back at the replica's next merge or return, or
when its next step begins.

    context        what happens at optimizer.step()
    run            a merge: the gradients are reduced. Then each replica steps, in its turn
    cross-replica  the pre-hook steps replicas 1 .. N-1, then lends to replica 0, whose step is
                   the one that was called: hooks and schedulers see one step
    whole          with a closure (its forward spans all replicas), with hooks of the user's, or
                   where steps draw random numbers, a step in the cross-replica context runs on
                   the mirrored parameters, and the others take over the result

Options in ``param_groups`` are shared: every replica gets a copy before the step, and what the
first one's step writes into its copy is kept. The first replica's state is the optimizer's own.
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable
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
from mirror.errors import ReplicaMismatchError, StrategyError
from mirror.replica.compiler import Hold, let_go, letting_go, not_compiled, take_hold
from mirror.replica.merge_point import MergePoint
from mirror.replica.optimizer_groups import has_hooks, mirrored_group, of_replica
from mirror.replica.optimizer_state import FindHere, SharedState
from mirror.replica.parameters import MirroredParameter
from mirror.replica.variables import Variable, same_bits, variable_of
from mirror.values import map_structure

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup
    from mirror.replica.run import ReplicaContext

_serials = itertools.count(1)
_watching = threading.Lock()
_hooks: list[Any] = []


def watch_optimizer_steps() -> None:
    """Installs the global hooks, once."""
    with _watching:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))
            # A step's pre- and post-hook must see one frame, which the compiler would break up.
            not_compiled(Optimizer.profile_hook_step(lambda self: None))  # they share their code


@letting_go
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    mirror: OptimizerMirror | None = optimizer.__dict__.get("_mirror")
    step = sys._getframe(1)
    if mirror is not None:
        if mirror.is_within_step(step):
            return None  # a subclass's step has called its base's
        mirror.reclaim()
    group = mirrored_group(optimizer)
    if group is None:
        return None
    if mirror is None or mirror.group is not group:
        # On the optimizer, so that the two go together; its copies and pickles leave it out.
        mirror = optimizer.__dict__["_mirror"] = OptimizerMirror(optimizer, group)
    group.check_usable()
    replica: Any = current.replica
    mirror.holds[threading.get_ident()] = let_go()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if replica is None or replica.group is not group:
        mirror.step_everywhere(step, args, kwargs, closure)
        return None
    if closure is not None:
        with torch.enable_grad():
            once = _Once(closure())
        args, kwargs = (args[0], once, *args[2:]), {k: kwargs[k] for k in kwargs if k != "closure"}
    mirror.step_here(step, replica)
    return args, kwargs


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
        self._states: list[dict[Any, Any]] = [defaultdict(dict) for _ in group.devices]
        self._state = SharedState(self._find_here(), {})  # what optimizer.state is between steps
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        self._lent_groups: list[list[dict[str, Any]]] = [[] for _ in group.devices]
        self._lent_to: int | None = None
        self._is_whole = False  # whether the step in progress runs on the mirrored parameters
        self._draws = False  # whether a step has been seen to draw random numbers
        self._random: Tensor | None = None  # the random state when a replica's step began
        self._alone = threading.Lock()  # held while lent
        # By thread, what the compiler had on it when step was called. A step that raises does not
        # give it back; the compiled function that called step does, when it ends.
        self.holds: dict[int, Hold] = {}
        self.step: FrameType | None = None  # torch's call that the step in progress is
        group.optimizers.add(self)

    # Steps

    def step_here(self, step: FrameType, context: ReplicaContext) -> None:
        """Merges the replicas before their steps, and lends to the calling one."""
        self._refuse_what_is_not_mirrored()

        def action(payloads: dict[int, None]) -> dict[int, None]:
            run = context.run
            self.group.gradients.settle(run.shares())
            self._refresh()
            return payloads

        name = f"{type(self._optimizer()).__name__} #{self._serial}"
        context.run.merge(context.replica_id, MergePoint("optimizer.step", (name,), None, action))
        self._lend(context.replica_id, step)
        context.lent.append(self)

    def _refuse_what_is_not_mirrored(self) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
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
        self._refresh()
        if closure is not None or self._draws or has_hooks(args[0]):
            self._is_whole, self.step = True, step
            return
        function = type(args[0]).step
        function = getattr(function, "__wrapped__", function)
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
        assert self._random is not None
        return not torch.equal(random_state(self.group.devices[replica_id]), self._random)

    def end_step(self) -> None:
        """Gives back after a step; outside ``run`` all replicas are now equal again."""
        if self._is_whole:
            self._is_whole, self.step = False, None
            for variable in self._variables():
                variable.carry()
            self._state.seen = True
            self._refresh()
            return
        replica: Any = current.replica
        if replica is not None and self in replica.lent:
            replica.lent.remove(self)
            drawn = self._has_drawn(replica.replica_id)
            self.give_back()
            if drawn:
                raise StrategyError(
                    "this optimizer's step draws random numbers, of which every replica would "
                    "draw its own; call step outside strategy.run"
                )
            return
        if self._lent_to is not None:
            for variable in self._variables():
                variable.version = variable.copies[0]._version
        self.give_back()

    def is_within_step(self, frame: FrameType) -> bool:
        """Whether ``frame`` was called by the step in progress."""
        caller: FrameType | None = frame if self.step is not None else None
        while caller is not None and caller is not self.step:
            caller = caller.f_back
        return caller is not None

    def reclaim(self) -> None:
        """Takes back from a step of the same replica, or of the cross context, that raised."""
        self._is_whole, self.step = False, None
        replica: Any = current.replica
        if replica is not None and replica.group is self.group:
            if self in replica.lent:
                replica.lent.remove(self)
                self.give_back()
        elif self.group.running is None and self.is_lent:
            self.group.recover()

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
        optimizer.state = self._state
        self._alone.release()

    # State

    def take_over(self, source: int, others: Iterable[int]) -> None:
        """Gives one replica's state to others."""
        for r in others:
            state: dict[Any, Any] = defaultdict(dict)
            for key, value in self._states[source].items():
                variable = variable_of(key)
                mine = key if variable is None else variable.targets[r]
                state[mine] = self._copied(value, source, r)
            self._states[r] = state
            if r == 0:
                self._publish_first()

    def check(self, names: tuple[str, ...]) -> None:
        """Raises ReplicaMismatchError for state tensors that differ between replicas."""
        self._refresh()
        for variable in self._variables():
            first = self._states[0].get(variable.targets[0], {})
            for r in range(1, self.group.num_replicas):
                other = self._states[r].get(variable.targets[r], {})
                for key in first.keys() | other.keys():
                    if not _same(first.get(key), other.get(key)):
                        raise ReplicaMismatchError(
                            f"optimizer state {key!r} of parameter {variable.name!r} differs on "
                            f"{names[r]} from {names[0]}; replicas must hold the same bits"
                        )

    def _find_here(self) -> FindHere:
        # Weak: the optimizer holds its state for longer than we should hold it.
        mirror = weakref.ref(self)

        def find_here(key: Any) -> tuple[dict[Any, Any], Any, Any] | None:
            alive = mirror()
            return None if alive is None else alive.state_here(key)

        return find_here

    def state_here(self, key: Any) -> tuple[dict[Any, Any], Any, Any] | None:
        """Returns where code inside ``run`` finds a state entry. See ``FindHere``."""
        replica: Any = current.replica
        if replica is None or replica.group is not self.group:
            return None
        variable = variable_of(key)
        if variable is None:
            mine, owner = key, key
        else:
            mine, owner = variable.targets[replica.replica_id], variable.owner()
        return (
            self._states[replica.replica_id],
            mine,
            owner if replica.replica_id == 0 else None,
        )

    def _lend(self, replica_id: int, step: FrameType) -> None:
        self._alone.acquire()
        optimizer = self._optimizer()
        assert optimizer is not None
        self.step = step
        self._random = random_state(self.group.devices[replica_id])
        self._lent_to = replica_id
        optimizer.param_groups = self._lent_groups[replica_id]
        optimizer.state = self._states[replica_id]  # type: ignore[assignment]

    def _refresh(self) -> None:
        """Brings every replica's groups and state in line with the optimizer's own."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._groups = optimizer.param_groups
        for r, lent in enumerate(self._lent_groups):
            lent[:] = [
                {**options, "params": of_replica(options["params"], r)} for options in self._groups
            ]
        if optimizer.state is not self._state:
            self._state = SharedState(self._find_here(), optimizer.state)
            optimizer.state = self._state
        if self._state.seen:
            self._state.seen = False
            self._states[0] = defaultdict(dict)
            for key, value in self._state.raw_items():
                variable = variable_of(key)
                self._states[0][key if variable is None else variable.targets[0]] = value
            self.take_over(0, range(1, self.group.num_replicas))

    def _keep_what_the_first_wrote(self) -> None:
        for options, lent in zip(self._groups, self._lent_groups[0], strict=True):
            for key, value in lent.items():
                if key != "params" and options.get(key, options) is not value:
                    options[key] = value
        self._publish_first()

    def _publish_first(self) -> None:
        """Enters the first replica's state, which is the optimizer's own, under the parameters."""
        for key, value in self._states[0].items():
            variable = variable_of(key)
            self._state.put(key if variable is None else variable.owner(), value)

    def _copied(self, value: Any, source: int, destination: int) -> Any:
        home, device = self.group.devices[source], self.group.devices[destination]

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.detach().to(device if leaf.device == home else leaf.device, copy=True)
            return copy.deepcopy(leaf)

        return map_structure(copied, value)

    def _variables(self) -> list[Variable]:
        return [
            parameter._mirrored
            for options in self._groups
            for parameter in options["params"]
            if isinstance(parameter, MirroredParameter)
        ]


class _Once:
    """A closure that was evaluated before the replicas merged."""

    def __init__(self, loss: Any) -> None:
        self._losses = [loss]

    def __call__(self) -> Any:
        if not self._losses:
            raise StrategyError(
                "this optimizer evaluates its closure several times, on losses that differ "
                "between replicas; call step(closure) outside strategy.run, where the closure's "
                "forward spans all replicas"
            )
        return self._losses.pop()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bits(a, b)
    return type(a) is type(b) and (not isinstance(a, (int, float, str, bool)) or a == b)
