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


class _Contents:
    """The elements of a container at one moment; equal to others if all are the same objects."""

    __slots__ = ("_elements",)

    def __init__(self, container: Any) -> None:
        pairs = type(container) is dict
        self._elements = [*container, *(container.values() if pairs else ())]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Contents):
            return NotImplemented
        return list(map(id, self._elements)) == list(map(id, other._elements))

    __hash__ = None  # type: ignore[assignment]


def containers_of(modules: ModuleRegistry) -> ProcessState:
    """Returns the contents of the modules' containers, for ``ParallelRuns``."""

    def contents() -> dict[tuple[int, str], _Contents]:
        return {key: _Contents(container) for key, container in _containers(modules)}

    return ProcessState(
        contents,
        "forward changes a list, dict or set of a module in place, which they share; set a new "
        "one, as in self.seen = [*self.seen, x], which each replica keeps for itself",
    )


def _containers(modules: ModuleRegistry) -> Iterator[tuple[tuple[int, str], Any]]:
    for module, _ in modules.mirrored():
        for name, value in module.__dict__.items():
            if type(value) in _CONTAINERS and name not in _TORCHS and not is_own(module, name):
                yield (id(module), name), value
