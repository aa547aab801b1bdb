"""The state of a shared optimizer, and the swap of its parameters for those of one replica.

``OptimizerState`` has the state of every replica, which is ``optimizer.state`` between steps.
``ParamGroupSwap`` swaps one replica's parameters and state in, for a step.

[Note: Lending an optimizer]
Problem: an optimizer holds the mirrored parameters; its step needs one replica's.
Rule: for a step, ``param_groups`` and ``state`` become those of one replica, over ordinary
parameters; afterwards the shared ones return. In between only this replica uses the optimizer. A
step that raises ends the same way. If an interrupt hits that, the replica's next merge, its return
or its next step ends it.
Options: ``param_groups`` are shared, so every replica gets a copy of their options before its
step. What the first replica's step, or a hook of it, writes into its copy is kept. The first
replica's state is the optimizer's own.
At once: replicas that run at once each step a clone, an object of the same class with its groups
and state, while the optimizer itself has none. So no replica waits for another one's step.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirror.base.mutex import Mutex
from mirror.base.process_bound import reinit_after_fork
from mirror.execution.replicas import Replicas
from mirror.execution.run import SwappedOptimizer, current, replica_of
from mirror.replica.exactness.replica_checks import ComparePair, VisitValue
from mirror.replica.optimizers.param_groups import ParamGroupsView, keep_options, state_key
from mirror.replica.params.mirrored_tensor import path_of, same_kind
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.replicated_params import param_of
from mirror.replica.params.shared_memory import storage_of
from mirror.threads.merge_point import RunCancelled
from mirror.values import are_identical, leaves_of, map_structure

# A replica's state, the key in it, and the key in the shared state if that is to see new entries.
Here = tuple[dict[Any, Any], Any, Any]


class SharedState(defaultdict[Any, Any]):
    """``optimizer.state`` between steps.

    Inside ``run``, reading an entry returns the current replica's; outside, the first replica's.
    Any access outside may be a change, so ``seen`` is set.

    Args:
        keeper: finds the entries of a replica.
    """

    def __init__(self, keeper: ReplicaStates, entries: dict[Any, Any]) -> None:
        super().__init__(dict, entries)
        self.seen = True
        # Weak: the optimizer keeps its state for longer than it needs the keeper.
        self._keeper = weakref.ref(keeper)

    def _find_here(self, key: Any) -> Here | None:
        keeper = self._keeper()
        return None if keeper is None else keeper.find_here(key)

    def is_kept(self) -> bool:
        """Whether it is the state of an optimizer that is alive."""
        keeper = self._keeper()
        return keeper is not None and keeper.shared is self

    def raw_items(self) -> Iterable[tuple[Any, Any]]:
        return super().items()

    def put(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
        here = self._find_here(key)
        if here is None:
            self.seen = True
            return super().__getitem__(key)
        state, mine, _ = here
        if mine not in state:
            self[key] = {}
        return state[mine]

    def __setitem__(self, key: Any, value: Any) -> None:
        here = self._find_here(key)
        if here is None:
            self.seen = True
            super().__setitem__(key, value)
            return
        state, mine, published = here
        state[mine] = value
        if published is not None:
            self.put(published, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        here = self._find_here(key)
        if (key not in self) if here is None else (here[1] not in here[0]):
            self[key] = default
        return self[key]

    def get(self, key: Any, default: Any = None) -> Any:
        here = self._find_here(key)
        if here is not None:
            state, mine, _ = here
            return state.get(mine, default)
        self.seen = True
        return super().get(key, default)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict, dict(super().items()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(defaultdict(dict, super().items()), memo)


def _wrap_method(name: str) -> Callable[..., Any]:
    original = getattr(defaultdict, name)

    def method(self: SharedState, *args: Any, **kwargs: Any) -> Any:
        self.seen = True
        return original(self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in "items values pop popitem update clear __delitem__".split():
    setattr(SharedState, _name, _wrap_method(_name))


class ReplicaStates:
    """The state of one optimizer on every replica, under the replica's own parameters.

    The first replica's entries are the objects in ``optimizer.state``. The others' may be stale:
    they are copied when they are used, see ``mirrored_optimizer.py``.
    """

    shared_kind: type[SharedState] = SharedState

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.shared = self.shared_kind(self, {})  # what optimizer.state is between steps
        self._by_replica: list[dict[Any, Any]] = [defaultdict(dict) for _ in replicas.devices]
        self._are_behind = False
        self.after_fork()
        reinit_after_fork(self)
        self._published: list[Any] = []  # the first replica's entries in the shared state

    def after_fork(self) -> None:
        """Creates the lock, also in a forked process: the threads that held it are gone."""
        self._copying = Mutex()

    def state_of(self, replica_id: int) -> dict[Any, Any]:
        """Returns one replica's state, up to date."""
        if replica_id > 0:
            self.catch_up()
        return self._by_replica[replica_id]

    def is_scattered(self, optimizer: Optimizer) -> bool:
        """Whether the replicas hold the optimizer's state in parts now."""
        return False

    def catch_up(self) -> None:
        """Copies the first replica's state to stale ones."""
        if self._are_behind:
            self._copying.call(self._copy_first)

    def _copy_first(self) -> None:
        if self._are_behind:
            self._copy(0, range(1, self._replicas.num_replicas))
            self._are_behind = False

    def read(self, optimizer: Optimizer, *, is_whole: bool = False) -> None:
        """Reads the state that the cross-replica context may have changed.

        Args:
            is_whole: whether the step runs on the mirrored parameters. Then the optimizer may use
                the state of another optimizer.
        """
        if "state" not in vars(optimizer):
            return
        found: Any = optimizer.state
        if found is not self.shared:
            if is_whole and isinstance(found, SharedState) and found.is_kept():
                return
            _move_to_params(found)
            self.shared = self.shared_kind(self, found)
            optimizer.state = self.shared
            _replace_in_wrappers(found, self.shared)
        if self.shared.seen:
            self._by_replica[0] = defaultdict(dict)
            for key, value in self.shared.raw_items():
                variable = param_of(key)
                self._by_replica[0][key if variable is None else variable.home] = value
            self.shared.seen, self._are_behind = False, True

    def follow_first(self) -> None:
        """Makes the first replica's state that of all."""
        self._are_behind = True

    def sync_idle(self, source: int, others: Iterable[int]) -> None:
        """Copies one replica's state to others."""
        if not self._are_behind:  # else every reader gets the first one's
            self._copy(source, others)

    def publish_first(self) -> None:
        """Enters the first replica's state, which is the optimizer's own, under the parameters."""
        entries = list(self._by_replica[0].values())
        if are_identical(entries, self._published):
            return
        for key, value in self._by_replica[0].items():
            variable = param_of(key)
            self.shared.put(key if variable is None else variable.owner(), value)
        self._published = entries

    def check(self, variables: Sequence[ReplicatedParam], compare: ComparePair) -> None:
        """Calls ``compare`` with the state of every replica and that of the first one."""
        if self._are_behind:
            return
        names = self._replicas.names
        for variable in variables:
            first = self._by_replica[0].get(variable.home, {})
            for r in range(1, self._replicas.num_replicas):
                other = self._by_replica[r].get(variable.targets[r], {})
                for key in first.keys() | other.keys():

                    def describe(
                        key: Any = key, variable: ReplicatedParam = variable, r: int = r
                    ) -> str:
                        return f"{state_name(key, variable)} differs on {names[r]} from {names[0]}"

                    compare(first.get(key), other.get(key), describe)

    def visit_first(self, variables: Sequence[ReplicatedParam], visit: VisitValue) -> None:
        """Calls ``visit`` with the first replica's state."""
        for variable in variables:
            for key, value in self._by_replica[0].get(variable.home, {}).items():
                visit(value, partial(state_name, key, variable))

    def bytes_of_replicas(self) -> list[int]:
        """Returns the bytes of state that each replica holds; 0 for one that follows the first."""
        first = num_bytes(value for _, value in self.shared.raw_items())
        others = [0 if self._are_behind else num_bytes(own.values()) for own in self._by_replica]
        return [first, *others[1:]]

    def find_here(self, key: Any) -> Here | None:
        """Returns the place of a state entry inside ``run``; ``None`` outside."""
        replica = replica_of(self._replicas)
        if replica is None:
            return None
        variable = param_of(key)
        if variable is None:
            mine, owner = key, key
        else:
            mine, owner = state_key(variable, replica.replica_id), variable.owner()
        self.catch_up()  # before the caller may change the first replica's
        state = self._by_replica[replica.replica_id]
        return state, mine, owner if replica.replica_id == 0 else None

    def _copy(self, source: int, others: Iterable[int]) -> None:
        for r in others:
            state: dict[Any, Any] = defaultdict(dict)
            written: set[int] = set()
            for key, value in self._by_replica[source].items():
                variable = param_of(key)
                mine = key if variable is None else state_key(variable, r)
                # Into the tensors that are there: a CUDA graph has their addresses.
                known = leaves_of(self._by_replica[r].get(mine)) if r > 0 else []
                state[mine] = self._copy_value(value, source, r, known, written)
            self._by_replica[r] = state
            if r == 0:
                self.publish_first()

    def _copy_value(
        self,
        value: Any,
        source: int,
        destination: int,
        known: Sequence[Any] = (),
        written: set[int] | None = None,
    ) -> Any:
        """Returns a replica's copy of an entry, in the tensors of the one that it has if they fit.

        Args:
            known: the leaves of the entry that it has.
            written: the storages that have a copy already.
        """
        devices = (self._replicas.parameter_device, *self._replicas.devices[1:])
        home, device = devices[source], devices[destination]
        places = self._replicas.mesh if self._replicas.mesh.is_model_parallel else None

        here = iter(known)

        def copy_leaf(leaf: Any) -> Any:
            target = next(here, None)
            if isinstance(leaf, Tensor):
                there = device if leaf.device == home else leaf.device
                if places is not None:
                    there = places.translate(leaf.device, device)
                if written is not None and _may_take(target, leaf, there, written):
                    return target.copy_(leaf.detach())
                return leaf.detach().to(there, copy=True)
            return copy.deepcopy(leaf)

        return map_structure(copy_leaf, value)


def _may_take(
    target: Any, value: Tensor, device: torch.device, written: set[int]
) -> TypeGuard[Tensor]:
    """Whether a tensor of a replica's state may take a value, and nothing else changes with it."""
    fits = (
        type(target) is Tensor
        and type(value) is Tensor
        and target.device == device
        and same_kind(target, value)
        and target.stride() == value.stride()
        and 0 not in target.stride()
        and not (target.requires_grad or target.is_inference())
    )
    if not fits or (storage := storage_of(target)) in (*written, storage_of(value)):
        return False
    written.add(storage)
    return True


def _move_to_params(entries: dict[Any, Any]) -> None:
    """Moves state to the devices of its parameters, as ``load_state_dict`` does.

    An optimizer that makes state in its constructor, as Adagrad does, makes it where the
    parameters are: those of a scope move to the first replica's device at their first use.
    """
    for key, entry in entries.items():
        variable = param_of(key)
        if variable is None or not isinstance(entry, dict):
            continue
        home = variable.home
        for name, value in entry.items():
            if name != "step" and isinstance(value, Tensor) and value.shape == home.shape:
                entry[name] = value.to(home.device)


def _replace_in_wrappers(found: Any, shared: SharedState) -> None:
    """Replaces a state in the wrappers that refer to it (``self.state = base.state``).

    The garbage collector finds these: a reference count depends on the interpreter. That takes
    milliseconds, once for each state that an optimizer gets.
    """
    for holder in gc.get_referrers(found):
        # An instance refers to its attributes itself, or by its dict.
        for owner in (holder, *(gc.get_referrers(holder) if type(holder) is dict else ())):
            attributes = getattr(owner, "__dict__", None)
            if type(attributes) is not dict or isinstance(owner, ModuleType):
                continue
            for name, value in list(attributes.items()):
                if value is found:
                    attributes[name] = shared


def num_bytes(entries: Iterable[Any]) -> int:
    """Returns the bytes of the tensors in state entries."""
    sizes: list[int] = []
    for entry in entries:
        map_structure(lambda leaf: sizes.append(getattr(leaf, "nbytes", 0)), entry)
    return sum(sizes)


def state_name(key: Any, variable: ReplicatedParam) -> str:
    """Returns the name of a state entry, for messages."""
    return f"optimizer state {key!r} of parameter {path_of(variable.owner(), variable.name)!r}"


HEARING_SECONDS = 0.05
ALL_REPLICAS = -1  # every replica steps a clone of the optimizer


class ParamGroupSwap:
    """One optimizer's groups and state, swapped for one replica's at a time.

    See [Note: Lending an optimizer].

    Args:
        lent: contains this object while a replica uses the optimizer.

    Attributes:
        states: the optimizer's state on every replica.
        parameters: the contents of the groups at the last step.
        groups: the optimizer's own groups, also while others are swapped in.
        is_begun: whether a step of the first replica is in progress. If it raises, parameters
            and state may be partly updated.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        states: ReplicaStates,
        num_replicas: int,
        lent: set[SwappedOptimizer],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.states = states
        self._lent = lent
        self.parameters = ParamGroupsView(())
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        self._of_replicas: list[list[dict[str, Any]]] = [[] for _ in range(num_replicas)]
        self._clones: list[Any] = []  # while all replicas step at once
        self._to: int | None = None
        self._alone = threading.Lock()  # held while lent
        self.is_begun = False
        reinit_after_fork(self)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, while it lives."""
        return self._optimizer()

    def after_fork(self) -> None:
        """Swaps out in a forked process, where no replica runs."""
        self._alone = threading.Lock()
        if self._to is not None:
            self._alone.acquire()
            self.swap_out()

    def refresh(self, *, only_first: bool = False, is_whole: bool = False) -> None:
        """Updates the replicas' groups and state from the optimizer's own.

        Args:
            only_first: whether only the first replica's are needed.
            is_whole: whether the step runs on the mirrored parameters, without a swap.
        """
        optimizer = self._optimizer()
        assert optimizer is not None  # the caller keeps it alive
        self.groups = optimizer.param_groups
        if not self.parameters.are_in(self.groups):
            self.parameters = ParamGroupsView(self.groups)
        for r in range(1 if only_first else len(self._of_replicas)):
            self._of_replicas[r] = self.parameters.groups_of(r, self.groups)
        self.states.read(optimizer, is_whole=is_whole)
        if not only_first:
            self.states.catch_up()  # before the first one steps

    def swap_in(self, replica_id: int) -> None:
        """Swaps in a replica's groups and state; waits until no other one has the optimizer."""
        groups, state = self._of_replicas[replica_id], self.states.state_of(replica_id)
        alone = self._alone
        while not alone.acquire(timeout=HEARING_SECONDS):
            # The replica that uses it may have failed.
            if current.replica is not None:
                current.replica.run.lockstep.check_going_on()
        if alone is not self._alone:
            raise RunCancelled
        optimizer = self._optimizer()
        assert optimizer is not None  # the caller keeps it alive
        self._to = replica_id
        self.is_begun |= replica_id == 0
        self._lent.add(self)
        optimizer.param_groups = groups
        optimizer.state = state  # type: ignore[assignment]

    def swap_in_all(self) -> None:
        """Makes a clone for every replica, in a merge; ``swap_out`` in a later one ends that."""
        self._alone.acquire()
        optimizer = self._optimizer()
        assert optimizer is not None  # the caller keeps it alive
        self._to, self.is_begun = ALL_REPLICAS, True
        self._lent.add(self)
        for r, groups in enumerate(self._of_replicas):
            clone = object.__new__(type(optimizer))
            vars(clone).update(vars(optimizer))
            clone.param_groups, clone.state = groups, self.states.state_of(r)  # type: ignore[assignment]
            self._clones.append(clone)
        optimizer.param_groups = []
        optimizer.state = {}  # type: ignore[assignment]

    def clone_of(self, replica_id: int) -> Optimizer:
        """Returns the clone that a replica steps."""
        clone: Optimizer = self._clones[replica_id]
        return clone

    def swap_out(self) -> None:
        """Puts the shared groups and state back; idempotent."""
        optimizer = self._optimizer()
        if self._to is None or optimizer is None:
            self._to = None
            self._lent.discard(self)
            return
        if self._to in (0, ALL_REPLICAS):
            keep_options(self.groups, self._of_replicas[0])
            self.states.publish_first()
        optimizer.param_groups = self.groups
        optimizer.state = self.states.shared
        self._clones = []
        self._lent.discard(self)
        self._to = None  # last: after an interrupt before this line, all of it is repeated
        self._alone.release()

    def force_out(self) -> None:
        """Swaps out after a failure, whichever replica uses it or waits for it; idempotent."""
        self.swap_out()
        alone, self._alone = self._alone, threading.Lock()
        with suppress(RuntimeError):  # it was not swapped in
            alone.release()  # a waiting thread then finds that there is a new lock

    @property
    def is_swapped_in(self) -> bool:
        """Whether a replica's groups are swapped in, by a step in progress or interrupted."""
        return self._to is not None
