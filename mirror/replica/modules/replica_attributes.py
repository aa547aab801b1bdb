"""Attributes that a forward pass sets on a module: one value per replica, joined like outputs.

[Note: Own attributes]
Problem: ``self.hidden = h`` in a forward pass sets an attribute of a module that all replicas
share.
Rule: when a replica first sets or deletes an attribute, the module's class gets a descriptor of
that name. It returns to every replica of a mirrored module its own value. On other modules, and
before a replica has set the attribute of this one, it acts as if there were none. After the run
the values are joined into the module's ordinary attribute, which the cross-replica context and
copies made there see. (Copies that a replica makes have its own values: ``watch_copies``.)

    values of the replicas                        value of the module
    tensors of the shape it had before            their mean, weighted by examples; the first
                                                  one, of integers
    tensors of their parts of the batch           their concatenation
    0-d floating tensors                          their mean, weighted by examples
    numbers or strings, all equal; one object     that; equal sizes too, but for those of examples
    anything else                                 PerReplica

A bool is shared: it usually says that something was done to shared objects (hooks registered,
submodules created). If replicas leave it different, the run fails.

A value that replicas only read stays as it was. In the next run every replica continues with its
own value, unless the cross-replica context has set another. Of that, each gets its part if it is
batched as the run's batch is, else a copy. See ``per_replica_values.py``.

Lists, dicts and sets that forward changes in place are shared by all replicas: ``containers_of``.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from mirror.base.dynamo import disable_dynamo, forget_compiled
from mirror.base.mutex import Mutex
from mirror.base.torch_private import SPLIT_CALL, wrap_once
from mirror.execution.parallel_runs import ProcessState, keep_own
from mirror.execution.run import Replica, current
from mirror.replica.modules.conversions import IGNORED, warn_of_ignored
from mirror.replica.modules.module_owner import interceptor_of, owner_of
from mirror.replica.modules.per_replica_values import MISSING, PerReplicaAttribute
from mirror.replica.modules.split_call import CallInterceptor

# The attributes that torch sets on a module, such as ``training``, are equal on all replicas.
_SHARED = frozenset(nn.Module().__dict__)
# A module's dicts, which are watched.
_DICTS = frozenset(("_parameters", "_buffers", "_modules"))
_installing = Mutex()


class ReplicaAttribute:
    """The descriptor of an attribute that replicas have set; see [Note: Own attributes]."""

    def __init__(self, name: str, default: Any) -> None:
        self._name = name
        self._default = default  # of the class

    @disable_dynamo
    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        value = MISSING
        if module is not None:
            found = own_values(module, self._name)
            if found is not None:
                own, replica = found
                value = own.read(replica)
            else:
                value = module.__dict__.get(self._name, MISSING)
        if value is MISSING:
            value = self._default
            if hasattr(type(value), "__get__"):
                value = value.__get__(module, owner)
        if value is MISSING:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        return value

    @disable_dynamo
    def __set__(self, module: nn.Module, value: Any) -> None:
        found = own_values(module, self._name)
        if found is not None:
            own, replica = found
            own.write(replica, value)
        else:
            module.__dict__[self._name] = value

    @disable_dynamo
    def __delete__(self, module: nn.Module) -> None:
        found = own_values(module, self._name)
        if found is not None:
            self.__get__(module, type(module))
            own, replica = found
            own.write(replica, MISSING)
        elif module.__dict__.pop(self._name, MISSING) is MISSING:
            raise AttributeError(self._name)


def own_values(module: nn.Module, name: str) -> tuple[PerReplicaAttribute, Replica] | None:
    """Returns the replicas' values of an attribute, and the current one of a module's replicas."""
    replica = current.replica
    if replica is None:
        return None
    call = interceptor_of(module)
    if not isinstance(call, CallInterceptor) or call.replicas is not replica.replicas:
        return None
    if not call.replicas.mirrors:
        return None
    # On the CallInterceptor, because copies and pickles of a module leave that out.
    own = call.own.get(name)
    if own is None:  # replicas that run at once come here at once: all use the same one
        made = PerReplicaAttribute(module, name, call.recorder.attributes)
        own = call.own.setdefault(name, made)
    return own, replica


def watch_attributes() -> None:
    """Makes attributes that replicas set on mirrored modules theirs; once, permanently."""
    wrap_once(nn.Module, "__setattr__", _wrap_setattr)
    wrap_once(nn.Module, "__delattr__", _wrap_delattr)


def _wrap_setattr(original: Callable[..., None]) -> Callable[..., None]:
    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if SPLIT_CALL in self.__dict__ and name not in _SHARED:
            if current.replica is not None:
                _notice(self, name, value)
            elif type(value) is Tensor and not torch.compiler.is_compiling():
                _record(self)  # so that it becomes mirrored
            elif name == IGNORED:
                warn_of_ignored(self, value)
        elif name == "training" and current.replica is not None:
            _record_mode(self, value)
        elif name in _DICTS:
            _record(self)  # so that the new dict is watched
        original(self, name, value)

    return set_attribute


def _wrap_delattr(original: Callable[..., None]) -> Callable[..., None]:
    def delete_attribute(self: nn.Module, name: str) -> None:
        if current.replica is not None and SPLIT_CALL in self.__dict__:
            _notice(self, name, MISSING)
        original(self, name)

    return delete_attribute


def _record(module: nn.Module) -> None:
    route = interceptor_of(module)
    if route is not None:
        route.recorder.record(module)


def _record_mode(module: nn.Module, mode: bool) -> None:
    """Records ``train()`` or ``eval()`` of a replica: all replicas must call it."""
    replica = current.replica
    if replica is None or owner_of(module) is not replica.replicas:
        return
    if replica.replicas.num_replicas > 1:
        if module.__dict__.get("training") is not mode:
            _own_mode(replica, module)
        of_replicas = replica.run.modes.setdefault(id(module), (module, {}))[1]
        of_replicas[replica.replica_id] = mode


@disable_dynamo
def _own_mode(replica: Replica, module: nn.Module) -> None:
    """Gives each replica a mode of a module for itself, before one changes it."""
    attributes = module.__dict__
    keep_own(
        replica,
        "changed the mode of a module, by train() or eval(), in run",
        ("mode", id(module)),
        partial(attributes.get, "training"),
        partial(attributes.__setitem__, "training"),
    )


def is_own(module: nn.Module, name: str) -> bool:
    """Whether replicas have set an attribute of this module."""
    own = own_attributes(module).get(name)
    return own is not None and own.is_set


def own_attributes(module: nn.Module) -> dict[str, PerReplicaAttribute]:
    """Returns the attributes that replicas have set, or looked at as if they had; it is live."""
    call = interceptor_of(module)
    return call.own if isinstance(call, CallInterceptor) else {}


@disable_dynamo
def _notice(module: nn.Module, name: str, value: Any) -> None:
    """Installs the descriptor of an attribute that a replica is about to set, or to delete."""
    attributes = module.__dict__
    if attributes.get(name, MISSING) is value:
        return
    if isinstance(value, (nn.Parameter, nn.Module)) or isinstance(module, LazyModuleMixin):
        return
    if any(name in attributes[kind] for kind in ("_parameters", "_buffers", "_modules")):
        return
    existing = inspect.getattr_static(type(module), name, MISSING)
    if hasattr(type(existing), "__set__") or own_values(module, name) is None:
        return
    _installing.call(setattr, type(module), name, ReplicaAttribute(name, existing))
    forget_compiled()  # compiled code reads the instance's __dict__


def watch_copies() -> None:
    """Makes ``copy`` and ``pickle`` see the replica's values of attributes; once, permanently."""
    wrap_once(nn.Module, "__reduce_ex__", _wrap_reduce_ex)


def _wrap_reduce_ex(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced = original(self, protocol)
        if current.replica is None or not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        route, state = interceptor_of(self), reduced[2]
        if not isinstance(route, CallInterceptor):
            return reduced
        if isinstance(state, dict):
            state = _own_state(self, state, route)
        elif isinstance(state, tuple) and state and isinstance(state[0], dict):  # it has slots
            state = (_own_state(self, state[0], route), *state[1:])
        return (*reduced[:2], state, *reduced[3:])

    return reduce_ex


def _own_state(module: nn.Module, state: dict[str, Any], route: CallInterceptor) -> dict[str, Any]:
    """Returns the state of a reduced module, with the replica's own values."""
    own_state = dict(state)
    # With attributes first set in this run, unless the class selects its state itself.
    for name in {*state, *route.own} if _gives_all(type(module)) else state:
        found = own_values(module, name) if is_own(module, name) else None
        if found is None:
            continue
        own, replica = found
        value = own.read(replica)
        if value is MISSING:
            own_state.pop(name, None)
        else:
            own_state[name] = value
    return own_state


def _gives_all(kind: type[nn.Module]) -> bool:
    return kind.__reduce__ is object.__reduce__ and (
        getattr(kind, "__getstate__", None) is getattr(nn.Module, "__getstate__", None)
    )


_CONTAINERS = frozenset((list, dict, set, deque))
_TORCHS = _SHARED | {"_all_weights"}
Mirrored = Callable[[], Iterable[tuple[nn.Module, str]]]


def containers_of(mirrored: Mirrored) -> ProcessState:
    """Returns the contents of the modules' containers, for ``ParallelRuns``.

    ``self.seen.append(x)`` in a forward pass changes one list for all replicas. Replicas that run
    at once would do so in the order of the clock.

    Args:
        mirrored: yields the mirrored modules, with their paths.
    """
    return ProcessState(
        lambda: _Contents(mirrored),
        "forward changes a list, dict or set of a module in place, which they share; set a new "
        "one, as in self.seen = [*self.seen, x], which each replica keeps for itself",
    )


class _Contents:
    """The elements of all containers at one moment.

    Equal to those of another moment if no container that is there at both has other objects.
    """

    __slots__ = ("_found",)

    def __init__(self, mirrored: Mirrored) -> None:
        self._found: dict[int, tuple[Any, list[Any]]] = {}
        for module, _ in mirrored():
            for name, value in module.__dict__.items():
                if type(value) in _CONTAINERS and name not in _TORCHS and not is_own(module, name):
                    elements = [*value, *value.values()] if isinstance(value, dict) else [*value]
                    self._found[id(value)] = value, elements

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Contents):
            return NotImplemented
        both = self._found.keys() & other._found.keys()
        return not any(
            list(map(id, self._found[key][1])) != list(map(id, other._found[key][1]))
            for key in both
        )

    __hash__ = None  # type: ignore[assignment]
