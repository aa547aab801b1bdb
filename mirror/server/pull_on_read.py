"""Modules that call a function before their parameters and buffers are read, to pull them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

Before = Callable[["str | None"], None]
"""Called with the name that is read, or with None if all are read."""


class PullOnReadDict(dict[str, Any]):
    """A module's dict that calls a function before each read.

    Copies and pickles of the module have plain dicts.
    """

    def __init__(self, entries: Mapping[str, Any], before: Before) -> None:
        super().__init__(entries)
        self._before = before

    def __getitem__(self, name: str) -> Any:
        self._before(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._before(name)
        return super().get(name, default)

    def items(self) -> Any:
        self._before(None)
        return super().items()

    def values(self) -> Any:
        self._before(None)
        return super().values()

    def plain(self) -> dict[str, Any]:
        """Returns the entries without calling the function."""
        return dict(super().items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: deepcopy(value, memo) for name, value in self.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(dict(super().items()).items())


def plain_parameters(module: nn.Module) -> dict[str, Any]:
    """Returns a module's own parameters by name, without pulling them."""
    return _plain(module._parameters)


def plain_buffers(module: nn.Module) -> dict[str, Any]:
    """Returns a module's own buffers by name, without pulling them."""
    return _plain(module._buffers)


def watch(module: nn.Module, before: Before) -> None:
    """Calls a function before each read of a module's own parameters and buffers."""
    vars(module)["_parameters"] = PullOnReadDict(plain_parameters(module), before)
    vars(module)["_buffers"] = PullOnReadDict(plain_buffers(module), before)


def unwatch(module: nn.Module) -> None:
    """Replaces the dicts of ``watch`` by plain ones."""
    vars(module)["_parameters"] = plain_parameters(module)
    vars(module)["_buffers"] = plain_buffers(module)


def _plain(entries: Any) -> dict[str, Any]:
    return entries.plain() if isinstance(entries, PullOnReadDict) else dict(entries)
