"""Handles: the tensors through which raw storage has left, and may be written unseen."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

_MOST = 8  # that are kept without looking which of them are gone


class StorageAliases(list[Callable[[], object]]):
    """What raw storage of one variable was handed out as, as long as it lives.

    A list, because "is there any?" is asked of every variable before every step.
    """

    def add(self, handle: Tensor | None) -> None:
        """Notes a handle; ``None`` for one that cannot be watched, which counts once."""
        if len(self) > _MOST:
            self.drop_dead()
        self.append(_gone if handle is None else weakref.ref(handle))

    def drop_dead(self) -> None:
        """Forgets those through which nobody can write any more."""
        if self:
            self[:] = [known for known in self if known() is not None]


def _gone() -> None:
    """The handle of raw storage that left in a form which cannot be watched."""
