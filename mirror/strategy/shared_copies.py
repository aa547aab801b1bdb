"""Shared copies: ordinary tensors beside a mirrored model that every replica of a step changes.

A step in ``run`` is called once per replica, so what it does to an ordinary tensor happens N
times. An average of the weights (EMA), or a momentum that the program updates by hand, then decays
by ``d ** N`` per step instead of ``d``: the numbers differ from one device's, without an error. In
the first runs of a step, the values that its code can reach are searched for lists of tensors with
the shapes of a mirrored module. The versions of these tensors are compared after each replica. If
a second replica changes one again, to other values, a warning names the list. Copying the same
values into a target network causes no warning.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.base.bitwise import have_equal_numbers
from mirror.base.mutex import Mutex
from mirror.compiler.free_variables import PLAIN, FreeVariables
from mirror.execution.parallel_runs import ParallelRuns
from mirror.execution.run import current
from mirror.replica.modules.module_owner import is_uninitialized
from mirror.replica.modules.module_registry import ModuleRegistry
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.threads.user_frames import warn_user

_MAX_SEARCHES = 3  # of the values that one function can reach
_MAX_COMPARISONS = 10  # runs of one function in which a copy changed
_MAX_TURNS = 10  # runs with a copy that take turns, where replicas would run at once
_MAX_TENSORS = 10_000

Shapes = tuple[torch.Size, ...]


class SharedCopies:
    """Finds the ordinary copies that several replicas of one strategy change.

    Args:
        modules: the mirrored modules.
        parallel_runs: under ``schedule="parallel"``, decides which runs take turns.

    Attributes:
        settled: the code of functions that are not examined any more.
    """

    def __init__(self, modules: ModuleRegistry, parallel_runs: ParallelRuns | None) -> None:
        self.settled: set[Any] = set()
        self._modules, self._parallel_runs = modules, parallel_runs
        self._searches: dict[Any, int] = {}
        self._copies: dict[Any, list[_Copy]] = {}

    def watch(
        self,
        key: Any,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        call: Callable[[int], Any],
    ) -> Callable[[int], Any]:
        """Returns ``call``, or a function that also watches the copies that ``fn`` may change.

        Args:
            key: stands for ``fn`` and for functions with the same code.
            call: calls ``fn`` as a replica.
        """
        searches = self._searches.get(key, 0)
        copies = self._copies.setdefault(key, [])
        if searches < _MAX_SEARCHES:
            self._searches[key] = searches + 1
            self._modules.mirror_recorded()  # as the run will: they are no copies
            for name, tensors in _find_copies(fn, args, kwargs, self._modules):
                if not any(copy.has_any_of(tensors) for copy in copies):
                    copies.append(_Copy(name, tensors))
        watched = [copy for copy in copies if copy.comparisons < _MAX_COMPARISONS]
        if not watched:
            if searches >= _MAX_SEARCHES:
                self.settled.add(key)
                self._searches.pop(key, None)
                self._copies.pop(key, None)
            return call
        if self._parallel_runs is not None and min(c.num_runs for c in watched) < _MAX_TURNS:
            self._parallel_runs.take_turns_once()
        begun = [_Changes(copy) for copy in watched]

        def call_and_compare(replica_id: int) -> Any:
            replica = current.replica
            if replica is not None:
                replica.run.shared = begun
            result = call(replica_id)
            for changes in begun:
                changes.record_changes(replica_id)
            return result

        return call_and_compare


def key_of(fn: Callable[..., Any]) -> Any:
    """Returns a key for a function: its code, that of a partial's function, or its class."""
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__code__", type(fn))


class _Copy:
    """The tensors of one copy.

    Attributes:
        name: where the program holds it.
        num_runs: the number of runs in which it was watched.
        comparisons: the number of those in which two replicas have changed it.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self.name, self.num_runs, self.comparisons = name, 0, 0
        self._tensors = [weakref.ref(tensor) for tensor in tensors]

    def tensors(self) -> list[Tensor]:
        """Returns those tensors that exist."""
        return [tensor for reference in self._tensors if (tensor := reference()) is not None]

    def has_any_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it has one of these tensors."""
        return not {id(tensor) for tensor in self.tensors()}.isdisjoint(map(id, tensors))


class _Changes:
    """The changes of a copy in one run."""

    def __init__(self, copy: _Copy) -> None:
        copy.num_runs += 1
        self._copy, self._tensors = copy, copy.tensors()
        self._versions = [tensor._version for tensor in self._tensors]
        self._first: dict[int, tuple[int, Tensor]] = {}
        self._mutex = Mutex()

    def record_changes(self, replica_id: int) -> None:
        """Compares the tensors after a piece of a replica's code, and warns.

        While replicas run at once, a change may be attributed to the wrong replica. That happens
        only to the one tensor that is being changed, so one of several tensors is not enough for a
        warning.
        """
        self._mutex.call(self._compare, replica_id)

    def _compare(self, replica_id: int) -> None:
        former, num_different = None, 0
        for index, tensor in enumerate(self._tensors):
            version = tensor._version
            if version == self._versions[index]:
                continue
            self._versions[index] = version
            first, values = self._first.get(index, (replica_id, None))
            if first == replica_id:
                self._first[index] = (replica_id, tensor.detach().clone())
            else:
                former = first
                num_different += values is None or not have_equal_numbers(tensor, values)
        if former is None:
            return
        self._copy.comparisons += 1
        if num_different > 1 or (num_different and len(self._tensors) == 1):
            self._copy.comparisons = _MAX_COMPARISONS
            self._warn(former, replica_id)
        self._tensors = []

    def _warn(self, first: int, second: int) -> None:
        warn_user(
            f"replicas {first} and {second} of one run have both changed {self._copy.name}, "
            "ordinary tensors with the shapes of a mirrored model (an average of its weights?). "
            "There is one such copy for all replicas, so it changes once per replica instead of "
            "once per step, and differs from one device's. Mirror it with strategy.mirror(copy), "
            "change it in mirror.get_replica_context().merge_call(fn), or outside run"
        )


def _find_copies(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: ModuleRegistry,
) -> Iterator[tuple[str, list[Tensor]]]:
    """Yields the lists of ordinary tensors that have the shapes of a mirrored module."""
    if next(modules.mirrored_modules(), None) is None:
        return
    try:
        found = list(_find_lists(fn, args, kwargs, modules))
    except Exception:  # values of any class: a proxy that cannot load, say
        return
    if not found:
        return
    known = _shapes_of_modules(modules)
    for name, tensors in found:
        if tuple(tensor.shape for tensor in tensors) in known:
            yield name, tensors


def _find_lists(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: ModuleRegistry,
) -> Iterator[tuple[str, list[Tensor]]]:
    seen: set[int] = set()
    for entry in FreeVariables([partial(fn, *args, **kwargs)]).entries:
        value = entry.value()
        name = entry.name.replace("the arguments of a partial", "the arguments")
        values = {name: value}
        if not isinstance(value, (*PLAIN, type, Tensor, nn.Module, dict, list, tuple)):
            for key, field in _fields_of(value):
                values[f"{name}.{key}"] = field
        for name, inner in values.items():
            if id(inner) not in seen:
                seen.add(id(inner))
                yield from ((name, found) for found in _lists_in(inner, modules) if found)


def _fields_of(value: Any) -> list[tuple[str, Any]]:
    """Returns an object's attributes; none of torch's objects, where a read may have effects."""
    fields = getattr(value, "__dict__", None)
    is_ours = type(value).__module__.partition(".")[0] in ("torch", "mirror")
    if is_ours or isinstance(value, (Optimizer, ModuleType)) or not isinstance(fields, dict):
        return []
    return list(fields.items())


def _lists_in(value: Any, modules: ModuleRegistry) -> Iterator[list[Tensor]]:
    if isinstance(value, nn.Module):
        others = [module for module in value.modules() if not modules.has(module)]
        parameters = _ordinary_of(p for m in others for p in m.parameters(recurse=False))
        yield parameters
        yield [*parameters, *_ordinary_of(b for m in others for b in m.buffers(recurse=False))]
    elif isinstance(value, (dict, list, tuple)) and len(value) < _MAX_TENSORS:
        yield _ordinary_of(list(value.values()) if isinstance(value, dict) else value)


def _ordinary_of(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if _is_ordinary(value)]


def _is_ordinary(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and not isinstance(value, (MirroredTensor, ReplicaParameter))
        and not is_uninitialized(value)
        and value.is_floating_point()
        and not value.is_inference()
    )


def _shapes_of_modules(modules: ModuleRegistry) -> set[Shapes]:
    """Returns the shapes of each mirrored module: of its parameters, trained ones, and all state.

    Lists of vectors count only for a whole model: lists of counters have such shapes, too.
    """
    mirrored = [module for module, _ in modules.mirrored_modules()]
    within = {id(child) for module in mirrored for child in module.children()}
    known: set[Shapes] = set()
    for module in mirrored:
        parameters = list(module.parameters())
        if any(map(is_uninitialized, chain(parameters, module.buffers()))):  # they have no shape
            continue
        trained = [p for p in parameters if p.requires_grad]
        buffers = [b for b in module.buffers() if b.is_floating_point()]
        states = module.state_dict().values()  # in an order of its own
        in_order = [t for t in states if isinstance(t, Tensor) and t.is_floating_point()]
        for tensors in (parameters, trained, [*parameters, *buffers], in_order):
            shapes = tuple(t.shape for t in tensors)
            if shapes and (id(module) not in within or any(len(shape) > 1 for shape in shapes)):
                known.add(shapes)
    return known
