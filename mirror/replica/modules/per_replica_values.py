"""Per-replica values: what each replica has set as a module's attribute, and how they are joined.

An attribute that replicas have set goes through these states:

    between runs
        the module's    it is the ordinary attribute; every replica begins with its part, or a copy
        left            every replica continues with its own value; the ordinary attribute is
                        joined from these, and has not been changed since
    in a run, for each replica
        untouched       as the run began
        read            has its first value, which it may change in place
        set             has a value of its own, or (``MISSING``) has deleted it
        flagged         has set a bool, which is the ordinary attribute for all at once

    what happens                         from              to
    first use in a run                   left              the module's, if that has been changed
    a replica reads                      untouched         read
    a replica sets or deletes            any               set, or flagged
    the run ends, or all merge:
        a replica has flagged it         set by another    StrategyError; also if bools differ
                                         else              the module's
        no replica has used it                             the module's
        replicas have only read it       read, unchanged   left, and the attribute stays
        else                                               left, joined into the attribute
    the run fails                        any               as before the run
"""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mirror.base.mutex import Mutex
from mirror.comm.reduce_ops import weighted_mean
from mirror.errors import StrategyError, StructureError
from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.run import Replica, Run
from mirror.execution.runner import Runner
from mirror.replica.gradients.parallel_backward import mark_boundary
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.scatter_gather.gather import join_outputs
from mirror.replica.scatter_gather.scatter import SplitPlan
from mirror.values import ABSENT, PerReplica, leaves_of, map_structure

MISSING: Any = object()
_beginning = Mutex()  # held while the first replica to use an attribute begins its run


class ModuleAttributes:
    """The attributes that replicas use in a run, to be joined after it; a part."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        # Weak keys: the run of a recomputation in a backward pass has no end.
        self._of_runs: weakref.WeakKeyDictionary[Run, list[PerReplicaAttribute]] = (
            weakref.WeakKeyDictionary()
        )

    def part(self) -> LifecycleHooks:
        """Returns the hooks of the attributes. See [Note: Parts]."""
        finish = WhilePending(self._of_runs, self._join)
        return LifecycleHooks(name="attributes", finish=finish, recover=self._of_runs.clear)

    def record(self, run: Run, own: PerReplicaAttribute) -> None:
        """Records an attribute, to be joined when the replicas of a run return or merge."""
        self._of_runs.setdefault(run, []).append(own)

    def _join(self, run: Run) -> None:
        own = self._of_runs.pop(run, [])
        while own:
            own.pop().join(run)


@dataclass(slots=True)
class _InRun:
    """The replicas' values of an attribute in one run.

    Attributes:
        values: by replica, the value that it has read or set.
        read: by replica, the leaves of a value that was only read, and their versions.
        flags: by replica, the bool that it has set.
    """

    run: Run | None = None
    values: dict[int, Any] = field(default_factory=dict)
    read: dict[int, tuple[list[Any], tuple[int, ...]]] = field(default_factory=dict)
    flags: dict[int, bool] = field(default_factory=dict)


class PerReplicaAttribute:
    """The replicas' values of one attribute of one module.

    ``_now`` is its state in a run; ``_left`` and ``_joined`` are that between runs.

    Attributes:
        is_set: whether a replica has set or deleted it. Until then it is an ordinary attribute,
            independent of what replicas have done with other modules of its class.
    """

    __slots__ = (
        *("_attributes", "_is_batched", "_joined", "_left", "_module", "_name", "_now"),
        "is_set",
    )

    def __init__(self, module: nn.Module, name: str, attributes: ModuleAttributes) -> None:
        self._attributes = attributes
        self._module = weakref.ref(module)
        self._name = name
        self._now = _InRun()
        self._left: dict[int, Any] = {}  # the replicas' values after the last run
        self._joined: tuple[Any, tuple[int, ...]] = (MISSING, ())  # their join, and its versions
        self._is_batched = False  # whether the joined value has one row per example
        self.is_set = False

    def read(self, replica: Replica) -> Any:
        """Returns the replica's value, ``MISSING`` if it has none."""
        if not self.is_set:
            return self._module_dict().get(self._name, MISSING)
        now, r = self._enter(replica.run), replica.replica_id
        if r not in now.values:
            value = self._initial_value(replica)
            if type(value) is bool or value is MISSING:
                return value
            now.values[r] = value
            now.read[r] = leaves_of(value), _versions(value)
        return now.values[r]

    def write(self, replica: Replica, value: Any) -> None:
        """Sets the replica's value; ``MISSING`` deletes it."""
        self.is_set = True
        now, r = self._enter(replica.run), replica.replica_id
        now.read.pop(r, None)
        if type(value) is bool:
            now.values.pop(r, None)
            now.flags[r] = self._module_dict()[self._name] = value
        else:
            now.flags.pop(r, None)
            now.values[r] = value

    def join(self, run: Run) -> None:
        """Makes the replicas' values, joined, the module's attribute."""
        now = self._now
        if now.run is not run:
            return
        self._now = _InRun()
        values = {r: now.values[r] for r in run.active if r in now.values}
        if now.flags and (values or len(set(now.flags.values())) > 1):
            raise StrategyError(
                f"the replicas have left attribute {self._name!r} different, {now.flags} by "
                "replica; a bool that forward sets is shared by all of them: keep what differs "
                "in a tensor or a number"
            )
        if not values:
            self._left = {}
        elif all(r in now.read and _equals(value, *now.read[r]) for r, value in values.items()):
            # Only read: the attribute stays, also if the parts now have other sizes.
            self._left |= values
        else:
            self._left = values
            self._set_joined({r: v for r, v in values.items() if v is not MISSING}, run)

    def suspend(self) -> tuple[Any, ...]:
        """Forgets the replicas' values; returns them, for ``resume``."""
        state = self._now, self._left, self._joined, self._is_batched, self.is_set
        self._now, self._left = _InRun(), {}
        return state

    def resume(self, state: tuple[Any, ...]) -> None:
        """Restores what ``suspend`` has returned."""
        self._now, self._left, self._joined, self._is_batched, self.is_set = state

    def _module_dict(self) -> dict[str, Any]:
        """Returns the module's ``__dict__``."""
        module = self._module()
        return {} if module is None else module.__dict__

    def _enter(self, run: Run) -> _InRun:
        if self._now.run is not run:
            _beginning.call(self._begin, run)
        return self._now

    def _begin(self, run: Run) -> None:
        if self._now.run is not run:  # of replicas that run at once, the first one begins
            joined, versions = self._joined
            value = self._module_dict().get(self._name, MISSING)
            if value is not joined or versions != _versions(joined):
                self._left = {}  # the cross-replica context has set it
            self._attributes.record(run, self)
            self._now = _InRun(run)

    def _initial_value(self, replica: Replica) -> Any:
        """Returns the value with which the replica begins a run."""
        if replica.replica_id in self._left:
            return self._left[replica.replica_id]
        value = self._module_dict().get(self._name, MISSING)
        if value is MISSING:
            return value
        sizes = replica.run.all_weights() if self._is_batched else None
        split, mesh = None, replica.replicas.mesh
        if sizes is not None:
            split = SplitPlan([int(n) for n in sizes], mesh, int(sum(sizes)))

        def part(leaf: Any) -> Any:
            if isinstance(leaf, PerReplica):
                if leaf.values[replica.replica_id] is ABSENT:
                    raise StrategyError(
                        f"attribute {self._name!r} was set by the other replicas, in a step that "
                        f"{replica.replicas.names[replica.replica_id]} sat out, and their values "
                        "cannot be joined; set it outside run before a batch of this size"
                    )
                return leaf.values[replica.replica_id]
            if not isinstance(leaf, Tensor) or isinstance(leaf, MirroredTensor):
                return leaf
            if split is not None and split.is_batched(leaf):
                leaf = split.rows(leaf, replica.replica_id)
            own: Tensor = leaf.to(mesh.peers_of(leaf.device)[replica.replica_id], copy=True)
            return own

        return map_structure(part, value)

    def _set_joined(self, values: dict[int, Any], run: Run) -> None:
        ordinary = self._module_dict()
        if not values:
            ordinary.pop(self._name, None)
            self._joined = MISSING, ()
            return
        before = ordinary.get(self._name, MISSING)
        joined = ordinary[self._name] = _separate(self._join(values, before, run), values)
        self._joined = joined, _versions(joined)

    def _join(self, values: dict[int, Any], before: Any, run: Run) -> Any:
        runner, parts = self._attributes.runner, list(values.values())
        weights = run.all_weights() or [1.0] * run.replicas.num_replicas
        if len(parts) > 1 and all(part is parts[0] for part in parts):
            return parts[0]
        # A batched value stays batched, also if the parts now have the size of the whole value.
        tensors = all(isinstance(part, Tensor) for part in (before, *parts))
        # In a split call the graphs of 0-d values (auxiliary losses) show how they are joined.
        module = self._module() if run.is_split else None
        is_loss = module is not None and all(
            isinstance(part, Tensor) and part.dim() == 0 and part.requires_grad for part in parts
        )
        if (
            tensors
            and not is_loss
            and not self._is_batched
            and all(p.shape == before.shape for p in parts)
        ):
            home = run.replicas.mesh.peers_of(parts[0].device)[0]
            here = [part.to(home) for part in mark_boundary(runner, values, parts)]
            return _mean(here, [weights[r] for r in values])
        self._is_batched = False
        try:
            joined = join_outputs(runner, values, weights, (), module if is_loss else None)
        except StructureError:
            every = [values.get(r, ABSENT) for r in range(run.replicas.num_replicas)]
            return PerReplica(every)
        self._is_batched = any(
            isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == sum(weights)
            for leaf in leaves_of(joined)
        )
        return joined


def _separate(joined: Any, parts: dict[int, Any]) -> Any:
    """Returns ``joined`` with memory of its own: replicas may write to theirs in place."""
    own = {id(leaf) for part in parts.values() for leaf in leaves_of(part)}

    def copy_shared(leaf: Any) -> Any:
        shared = isinstance(leaf, Tensor) and not isinstance(leaf, MirroredTensor)
        return leaf.clone() if shared and id(leaf) in own else leaf

    return map_structure(copy_shared, joined)


def _versions(value: Any) -> tuple[int, ...]:
    """Returns the versions of the tensors in ``value``, which change with every write."""
    if value is MISSING:
        return ()
    tensors = (leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor))
    return tuple(0 if leaf.is_inference() else leaf._version for leaf in tensors)


def _equals(value: Any, leaves: list[Any], versions: tuple[int, ...]) -> bool:
    """Whether a value has the same leaves, and none has been written to."""
    now = leaves_of(value)
    same = len(now) == len(leaves) and all(map(operator.is_, now, leaves))
    return same and _versions(value) == versions


def _mean(parts: list[Tensor], weights: list[float]) -> Tensor:
    """Returns the weighted mean; the value of equal tensors; the first of integer tensors."""
    first, *others = parts
    total = sum(weights)
    averaged = first.is_floating_point() or first.is_complex()
    constant = not any(part.requires_grad for part in parts)
    if not averaged or total == 0 or (constant and all(torch.equal(first, o) for o in others)):
        return first
    return weighted_mean(parts, weights)
