"""Options: what a step does with the groups of its optimizers, outside of their ``step``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mirror.errors import CompileError

_PLAIN = (bool, int, float, str, bytes, complex, type(None), tuple)


class _Group(dict[str, Any]):
    """A copy of a group, which notes that its learning rate is read.

    Attributes:
        traced: returns what stands for an option that changes from call to call.
    """

    is_rate_read = False
    traced: Callable[[str, Any], Any] = staticmethod(lambda key, value: value)

    def __getitem__(self, key: str) -> Any:
        return self._seen(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        return self._seen(key, super().get(key, default))

    def _seen(self, key: str, value: Any) -> Any:
        stands = self.traced(key, value)
        self.is_rate_read |= key == "lr" and stands is value
        return stands

    def items(self) -> Any:
        self.is_rate_read = True
        return super().items()

    def values(self) -> Any:
        self.is_rate_read = True
        return super().values()


class OptionGuards:
    """The groups of optimizers that a step may look at, and must leave as they are.

    Args:
        traced: returns what stands for an option: of optimizer, group, name and value.

    Attributes:
        read: the optimizers whose learning rates the step has read as numbers.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], traced: Callable[[Any, int, str, Any], Any]
    ) -> None:
        self._optimizers, self._traced = list(optimizers), traced
        self.read: list[Optimizer] = []
        self._changed: list[tuple[Optimizer, str]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it the step has copies of the groups; afterwards, its own again."""
        own = [optimizer.param_groups for optimizer in self._optimizers]
        copies: list[list[_Group]] = [[_Group(group) for group in groups] for groups in own]
        for optimizer, groups in zip(self._optimizers, copies, strict=True):
            for i, group in enumerate(groups):
                group.traced = partial(self._traced, optimizer, i)
            optimizer.param_groups = groups  # type: ignore[assignment]
        try:
            yield
        finally:
            for optimizer, before in zip(self._optimizers, own, strict=True):
                after = optimizer.param_groups
                optimizer.param_groups = before
                if any(getattr(group, "is_rate_read", True) for group in after):
                    self.read.append(optimizer)
                changed = _difference(before, after)
                if changed is not None:
                    self._changed.append((optimizer, changed))

    def check(self) -> None:
        """Raises the error for what has been changed.

        Raises:
            CompileError: a group has other options, or there are other groups.
        """
        for optimizer, what in self._changed:
            raise options_changed(type(optimizer).__name__, what)


def _difference(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str | None:
    """Returns what the groups after are not alike in."""
    if len(before) != len(after):
        return "its groups"
    for old, new in zip(before, after, strict=True):
        for name in {**old, **new}:
            if name not in old or name not in new:
                return f"option {name!r}"
            if not is_as_before(dict.get(old, name), dict.get(new, name)):  # unseen
                return f"option {name!r}"
    return None


def is_as_before(old: Any, new: Any) -> bool:
    """Whether a value is that which it was, as far as can be seen."""
    if old is new:
        return True
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return False
    if isinstance(old, _PLAIN) or isinstance(new, _PLAIN):
        return type(old) is type(new) and bool(old == new)
    return True


def options_changed(kind: str, what: str) -> CompileError:
    """Returns the error for a step that changes an optimizer's options."""
    return CompileError(
        f"the step cannot be compiled: it changes {what} of {kind}, which a compiled step would "
        "do once and never again; do it after the step (learning rates may change from call to "
        "call), or pass fallback='eager'"
    )
