"""BackwardValues: what the code of a backward pass reads, as the forward pass has found it.

Hooks and ``Function.backward`` run later than the guards of a call are compared. Values may have
changed since. Then the program is wrong, and the call is made once more, uncompiled: ``forward``
finds the values of then, and the backward pass those of now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mirror.compiler.capture.side_effects import SideEffects
from mirror.compiler.free_variables import FreeVariables
from mirror.compiler.runtime.trace_guards import GuardedValue


class BackwardValues:
    """The values of now, compared in later backward passes.

    Args:
        around: the places that hold them.
    """

    def __init__(self, around: FreeVariables) -> None:
        self._around, self._then = around, SideEffects(None, (), around)
        self._guard = GuardedValue(around.names, around.scan, around.watch())

    def hold(self) -> bool:
        """Whether the places hold the values of the trace."""
        return self._guard.holds()

    def find_change(self) -> str | None:
        """Returns the first change in words; ``None`` if there is none."""
        return self._guard.find_change()

    @contextmanager
    def of_then(self) -> Iterator[None]:
        """Within the block, the places hold the values of the trace."""
        now = SideEffects(None, (), self._around)
        self._then.put_back()
        try:
            yield
        finally:
            now.put_back()
