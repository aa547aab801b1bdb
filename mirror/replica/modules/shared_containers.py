"""Lists, dicts and sets of mirrored modules, which the replicas share: have replicas changed one?

An attribute that ``forward`` sets belongs to each replica: [Note: Own attributes] in
``replica_attributes.py``. But ``self.seen.append(x)`` changes one list for all. Replicas that run
at once would do so in the order of the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from mirror.base.torch_private import WEIGHT_LISTS
from mirror.execution.parallel_runs import ProcessState
from mirror.replica.modules.module_registry import ModuleRegistry
from mirror.replica.modules.replica_attributes import is_own

_CONTAINERS = frozenset((list, dict, set, deque))
_TORCHS = WEIGHT_LISTS | frozenset(nn.Module().__dict__) | {"_all_weights"}


def containers_of(modules: ModuleRegistry) -> ProcessState:
    """Returns the contents of the modules' containers, for ``ParallelRuns``."""
    return ProcessState(
        lambda: _Contents(modules),
        "forward changes a list, dict or set of a module in place, which they share; set a new "
        "one, as in self.seen = [*self.seen, x], which each replica keeps for itself",
    )


class _Contents:
    """The elements of all containers at one moment.

    Equal to those of another moment if no container that is there at both has other objects.
    """

    __slots__ = ("_found",)

    def __init__(self, modules: ModuleRegistry) -> None:
        self._found = {id(one): (one, _elements(one)) for one in _containers(modules)}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Contents):
            return NotImplemented
        both = self._found.keys() & other._found.keys()
        return not any(
            list(map(id, self._found[key][1])) != list(map(id, other._found[key][1]))
            for key in both
        )

    __hash__ = None  # type: ignore[assignment]


def _elements(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return list(container)


def _containers(modules: ModuleRegistry) -> Iterator[Any]:
    for module, _ in modules.mirrored():
        for name, value in module.__dict__.items():
            if type(value) in _CONTAINERS and name not in _TORCHS and not is_own(module, name):
                yield value
