"""Attributes that a forward pass sets on a module: every replica its own, joined like outputs.

[Note: Own attributes]
``self.hidden = h`` in a forward pass is an ordinary attribute of a module that all replicas share.
The first time that a replica sets or deletes one, the module's class gets a descriptor of that
name, which gives every replica of a mirrored module the value it set itself; on other modules it
does what instances do without. When the run ends the values are joined into the module's ordinary
attribute, which is what the cross-replica context and copies of the module see:

    the replicas leave                            the module has
    tensors of the shape it had before            their mean, weighted by examples; the first
                                                  one, of integers
    tensors of their parts of the batch           their concatenation
    0-d floating tensors                          their mean, weighted by examples
    numbers or strings, all equal; one object     that; equal sizes too, but for those of examples
    anything else                                 PerReplica

A bool is not each replica's own but says that something has been done, to what the replicas share
(hooks registered, submodules made); if they leave it different, the run fails.

What the replicas have only read stays as it was. In the next run every replica goes on with its
own value, unless the cross-replica context has set another: of that each gets its part, if it is
batched as the run's batch is, or a copy.
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from mirror.compiler import forget_compiled, opaque
from mirror.errors import StrategyError, StructureError
from mirror.execution.current import current
from mirror.replica.collectives.reduction import weighted_mean
from mirror.replica.copies.parameters import ReplicaParameter
from mirror.replica.gradients.seams import sewn
from mirror.replica.joining.outputs import join_outputs
from mirror.replica.routing import group_of
from mirror.replica.tensors import MirroredTensor
from mirror.values import ABSENT, PerReplica, leaves_of, map_structure

if TYPE_CHECKING:
    from mirror.execution.replicas import Replica, Together
    from mirror.execution.run import Run

_MISSING: Any = object()
# What torch itself keeps on a module, ``training`` among it, says the same on every replica.
_SHARED = frozenset(nn.Module().__dict__)
# Lists of their weights, or references to them, that RNNs make anew in every call.
_WEIGHT_LISTS = frozenset(("_flat_weights", "_flat_weight_refs"))
_DICTS = frozenset(("_parameters", "_buffers", "_modules"))
_installing = threading.Lock()


class OwnValues:
    """What the replicas have set of one attribute of one module."""

    __slots__ = (
        "_flags",
        "_is_batched",
        "_joined",
        "_module",
        "_name",
        "_read",
        "_run",
        "_settled",
        "_values",
    )

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._run: Together | None = None  # the run that the values are of
        self._values: dict[int, Any] = {}
        self._read: dict[int, Any] = {}  # how those were that the run has not set
        self._flags: dict[int, bool] = {}  # the bools that its replicas have set
        self._settled: dict[int, Any] = {}  # the values that the last run has left
        self._joined: tuple[Any, tuple[int, ...]] = (_MISSING, ())  # and their versions
        self._is_batched = False

    def read(self, replica: Replica) -> Any:
        """Returns the replica's value, ``_MISSING`` if it has none."""
        values = self._of(replica.run)
        if replica.replica_id not in values:
            value = self._first(replica)
            if type(value) is bool or value is _MISSING:
                return value
            values[replica.replica_id] = value
            self._read[replica.replica_id] = leaves_of(value), _versions(value)
        return values[replica.replica_id]

    def write(self, replica: Replica, value: Any) -> None:
        """Sets the replica's value; ``_MISSING`` deletes it."""
        values = self._of(replica.run)
        if type(value) is bool:
            values.pop(replica.replica_id, None)
            self._read.pop(replica.replica_id, None)
            self._flags[replica.replica_id] = self._attributes()[self._name] = value
        else:
            self._flags.pop(replica.replica_id, None)
            self._read.pop(replica.replica_id, None)
            values[replica.replica_id] = value

    def join(self, run: Run) -> None:
        """Makes what the replicas have set the module's attribute."""
        if self._run is not run:
            return
        flags, self._flags = self._flags, {}
        values = {r: self._values[r] for r in run.active if r in self._values}
        if flags:
            if values or len(set(flags.values())) > 1:
                raise StrategyError(
                    f"the replicas have left attribute {self._name!r} different, {flags} by "
                    "replica; a bool that forward sets is shared by all of them: keep what "
                    "differs in a tensor or a number"
                )
        if flags or not values:
            self._run, self._settled = None, {}
            return
        if all(r in self._read and _is_as(value, *self._read[r]) for r, value in values.items()):
            # Only read: the attribute is what it was, whatever the sizes of the parts are now.
            self._run, self._values = None, {}
            self._settled = self._settled | values
            return
        present = {r: value for r, value in values.items() if value is not _MISSING}
        attributes = self._attributes()
        before = attributes.get(self._name, _MISSING)
        self._run, self._values, self._settled = None, {}, values
        if not present:
            attributes.pop(self._name, None)
            joined = _MISSING
        else:
            joined = attributes[self._name] = _apart(self._join(present, before, run), present)
        self._joined = joined, _versions(joined)

    def _attributes(self) -> dict[str, Any]:
        module = self._module()
        return {} if module is None else module.__dict__

    def _of(self, run: Together) -> dict[int, Any]:
        if self._run is not run:
            self._run, self._values, self._read, self._flags = run, {}, {}, {}
            joined, versions = self._joined
            value = self._attributes().get(self._name, _MISSING)
            if value is not joined or versions != _versions(joined):
                self._settled = {}  # the cross-replica context has set it
            run.replicas.group.attributes.setdefault(run, []).append(self)
        return self._values

    def _first(self, replica: Replica) -> Any:
        """Returns what the replica begins a run with."""
        if replica.replica_id in self._settled:
            return self._settled[replica.replica_id]
        value = self._attributes().get(self._name, _MISSING)
        if value is _MISSING:
            return value
        sizes = replica.run.all_weights() if self._is_batched else None

        def part(leaf: Any) -> Any:
            if isinstance(leaf, PerReplica):
                if leaf.values[replica.replica_id] is ABSENT:
                    raise StrategyError(
                        f"attribute {self._name!r} was set by the other replicas, in a step that "
                        f"{replica.group.names[replica.replica_id]} sat out, and their values "
                        "cannot be joined; set it outside run before a batch of this size"
                    )
                return leaf.values[replica.replica_id]
            if not isinstance(leaf, Tensor) or isinstance(leaf, MirroredTensor):
                return leaf
            if sizes is not None and leaf.dim() > 0 and leaf.shape[0] == sum(sizes):
                start = int(sum(sizes[: replica.replica_id]))
                leaf = leaf.narrow(0, start, int(sizes[replica.replica_id]))
            own: Tensor = leaf.to(replica.device, copy=True)
            return own

        return map_structure(part, value)

    def _join(self, values: dict[int, Any], before: Any, run: Run) -> Any:
        parts = list(values.values())
        weights = run.all_weights() or [1.0] * run.replicas.num_replicas
        if len(parts) > 1 and all(part is parts[0] for part in parts):
            return parts[0]
        # What was batched is so again, also when the parts are now as large as all of it was.
        tensors = all(isinstance(part, Tensor) for part in (before, *parts))
        if tensors and not self._is_batched and all(p.shape == before.shape for p in parts):
            here = [
                part.to(run.replicas.devices[0])
                for part in sewn(run.replicas.group.runner, values, parts)
            ]
            return _mean(here, [weights[r] for r in values])
        self._is_batched = False
        try:
            joined = join_outputs(run.replicas.group.runner, values, weights)
        except StructureError:
            every = [values.get(r, ABSENT) for r in range(run.replicas.num_replicas)]
            return PerReplica(every)
        self._is_batched = any(
            isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == sum(weights)
            for leaf in leaves_of(joined)
        )
        return joined


class ReplicaAttribute:
    """The descriptor of an attribute that replicas have set; see [Note: Own attributes]."""

    def __init__(self, name: str, default: Any) -> None:
        self._name = name
        self._default = default  # of the class

    @opaque
    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        value = _MISSING
        if module is not None:
            own = own_values(module, self._name)
            if own is not None:
                value = own.read(current.replica)  # type: ignore[arg-type]
            else:
                value = module.__dict__.get(self._name, _MISSING)
        if value is _MISSING:
            value = self._default
            if hasattr(type(value), "__get__"):
                value = value.__get__(module, owner)
        if value is _MISSING:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        return value

    @opaque
    def __set__(self, module: nn.Module, value: Any) -> None:
        own = own_values(module, self._name)
        if own is not None:
            own.write(current.replica, value)  # type: ignore[arg-type]
        else:
            module.__dict__[self._name] = value

    @opaque
    def __delete__(self, module: nn.Module) -> None:
        own = own_values(module, self._name)
        if own is not None:
            self.__get__(module, type(module))
            own.write(current.replica, _MISSING)  # type: ignore[arg-type]
        elif module.__dict__.pop(self._name, _MISSING) is _MISSING:
            raise AttributeError(self._name)


def own_values(module: nn.Module, name: str) -> OwnValues | None:
    """Returns the replicas' values of an attribute, to code of a replica of the module's group."""
    replica = current.replica
    if replica is None:
        return None
    group = group_of(module)
    if group is None or group is not replica.group or group.num_replicas == 1:
        return None
    # On the TransparentCall, because copies and pickles of a module leave that out.
    own: dict[str, OwnValues] = module.__dict__["_compiled_call_impl"].own
    if name not in own:
        own[name] = OwnValues(module, name)
    return own[name]


def watch_attributes() -> None:
    """Has attributes noticed that replicas set on mirrored modules; once, for good."""
    original = nn.Module.__setattr__
    if hasattr(original, "_is_watched"):
        return

    @functools.wraps(original)
    def setattr_noticed(self: nn.Module, name: str, value: Any) -> None:
        if "_compiled_call_impl" in self.__dict__ and name not in _SHARED:
            if name in _WEIGHT_LISTS:
                value = [_for_all(weight) for weight in value]
            elif current.replica is not None:
                _notice(self, name, value)
            elif type(value) is Tensor and not torch.compiler.is_compiling():
                group = group_of(self)
                if group is not None:
                    group.record(self)  # the replicas must not share it
        elif name == "training" and current.replica is not None:
            _note_mode(self, value)
        elif name in _DICTS:
            group = group_of(self)
            if group is not None:
                group.record(self)  # the new one is to be watched as well
        original(self, name, value)

    deleting = nn.Module.__delattr__

    @functools.wraps(deleting)
    def delattr_noticed(self: nn.Module, name: str) -> None:
        if current.replica is not None and "_compiled_call_impl" in self.__dict__:
            _notice(self, name, _MISSING)
        deleting(self, name)

    setattr_noticed._is_watched = True  # type: ignore[attr-defined]
    nn.Module.__setattr__ = setattr_noticed  # type: ignore[method-assign]
    nn.Module.__delattr__ = delattr_noticed  # type: ignore[method-assign]


def _note_mode(module: nn.Module, mode: bool) -> None:
    """Notes that a replica calls ``train()`` or ``eval()``: all must, for it is one module."""
    replica: Any = current.replica
    group = group_of(module)
    if group is not None and group is replica.group and group.num_replicas > 1:
        of_replicas = replica.run.modes.setdefault(id(module), (module, {}))[1]
        of_replicas[replica.replica_id] = mode


def _for_all(weight: Any) -> Any:
    """Returns what stands for all replicas' copies: between write and read another may write."""
    is_reference = isinstance(weight, weakref.ref)
    copy = weight() if is_reference else weight
    owner = copy.variable.owner() if isinstance(copy, ReplicaParameter) else None
    if owner is None:
        return weight
    return weakref.ref(owner) if is_reference else owner


def is_own(module: nn.Module, name: str) -> bool:
    """Whether replicas have set an attribute of the module's class."""
    return isinstance(inspect.getattr_static(type(module), name, None), ReplicaAttribute)


@opaque
def _notice(module: nn.Module, name: str, value: Any) -> None:
    """Installs the descriptor of an attribute that a replica is about to set, or to delete."""
    attributes = module.__dict__
    if attributes.get(name, _MISSING) is value:
        return
    if isinstance(value, (nn.Parameter, nn.Module)) or isinstance(module, LazyModuleMixin):
        return
    if any(name in attributes[kind] for kind in ("_parameters", "_buffers", "_modules")):
        return
    existing = inspect.getattr_static(type(module), name, _MISSING)
    if hasattr(type(existing), "__set__") or own_values(module, name) is None:
        return
    with _installing:
        setattr(type(module), name, ReplicaAttribute(name, existing))
    forget_compiled()  # that code reads the instance


def _apart(joined: Any, parts: dict[int, Any]) -> Any:
    """Returns ``joined`` with memory of its own: replicas may write to theirs in place."""
    own = {id(leaf) for part in parts.values() for leaf in leaves_of(part)}

    def copied(leaf: Any) -> Any:
        shared = isinstance(leaf, Tensor) and not isinstance(leaf, MirroredTensor)
        return leaf.clone() if shared and id(leaf) in own else leaf

    return map_structure(copied, joined)


def _versions(value: Any) -> tuple[int, ...]:
    """Returns what changes when tensors in ``value`` are written."""
    if value is _MISSING:
        return ()
    tensors = (leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor))
    return tuple(0 if leaf.is_inference() else leaf._version for leaf in tensors)


def _is_as(value: Any, leaves: list[Any], versions: tuple[int, ...]) -> bool:
    """Whether a value holds what it did, unwritten."""
    now = leaves_of(value)
    same = len(now) == len(leaves) and all(map(operator.is_, now, leaves))
    return same and _versions(value) == versions


def _mean(parts: list[Tensor], weights: list[float]) -> Tensor:
    """Returns the weighted mean, of equal tensors their value; of integers the first."""
    first, *others = parts
    total = sum(weights)
    averaged = first.is_floating_point() or first.is_complex()
    constant = not any(part.requires_grad for part in parts)
    if not averaged or total == 0 or (constant and all(torch.equal(first, o) for o in others)):
        return first
    return weighted_mean(parts, weights)
