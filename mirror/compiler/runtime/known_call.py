"""KnownCall: a call of a compiled module by its signature, the code it has run, and its programs.

A trace must run no code that no call has run: what that changes in Python would happen once more,
and what it reads, such as a clock, could not be found in a trace. So each observation has guards
of all values that its call has left. Where they hold, the next call runs the same code.
"""

from __future__ import annotations

from typing import Any

_MAX_OBSERVATIONS = 4


class KnownCall:
    """A call by its signature.

    Attributes:
        pattern: the arguments and the gradients of the first call.
        programs: the guards and programs of its traces, the last one that was valid first.
        observations: what the last uncompiled calls have run, with guards of the values left.
        is_pending: whether it waits for a trace.
        is_unseen: whether the next call is to be observed.
        num_misses: how often in a row no observation was one of the values to be traced.
        has_differed: whether the trace of an observed call has taken another way.
    """

    __slots__ = (
        *("has_differed", "is_pending", "is_unseen", "num_misses", "observations"),
        *("pattern", "programs"),
    )

    def __init__(self, pattern: Any) -> None:
        self.pattern = pattern
        self.programs: list[tuple[Any, Any]] = []
        self.observations: list[tuple[Any, Any]] = []
        self.is_pending, self.is_unseen = False, True
        self.num_misses, self.has_differed = 0, False

    @property
    def mode(self) -> tuple[bool, bool]:
        """Its mode: of training, and grad mode."""
        return self.pattern.is_training, self.pattern.grad_enabled

    def find_valid(self) -> Any:
        """Returns the program whose guards hold, if there is one."""
        return _find(self.programs)

    def add_observation(self, values: Any, observed: Any, record: Any) -> None:
        """Adds a call with guards of the values it has left, its code and functions of torch."""
        self.observations.insert(0, (values, (observed, record)))
        del self.observations[_MAX_OBSERVATIONS:]
        self.is_unseen = False

    def observe_again(self) -> None:
        """Has the next call observed, in place of those before it."""
        self.observations.clear()
        self.has_differed = self.is_unseen = True

    def find_observation(self) -> Any:
        """Returns the code and the functions of a call that has left the values of now, if any."""
        if not self.observations:
            return None
        with self.pattern.in_its_modes():
            return _find(self.observations)

    def note_miss(self) -> int:
        """Has the next call observed; returns the number of misses in a row."""
        self.is_unseen = True
        self.num_misses += 1
        return self.num_misses

    def last_observation(self) -> Any:
        """Returns the code and the functions of the last observed call."""
        return self.observations[0][1]

    def find_change(self) -> str | None:
        """Returns in words what is not as in the last observed call."""
        with self.pattern.in_its_modes():
            found: str | None = self.observations[0][0].find_change()
            return found


def _find(guarded: list[tuple[Any, Any]]) -> Any:
    """Returns the first entry whose guards hold, and moves it to the front."""
    for i, (guards, found) in enumerate(guarded):
        if guards.hold():
            if i:
                guarded.insert(0, guarded.pop(i))
            return found
    return None
