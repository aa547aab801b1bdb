"""State that the process has once, and each replica of a run for itself: a turn swaps it in.

Random generators, flags such as the default dtype, and the modes of modules are such state. While
replicas take turns, ``SwappedState`` keeps the values of the replicas that wait. A value is kept
from the moment on when a replica of the run first changes that state (generators: from the start
of the run), so a run that changes none has nothing to swap.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Slot:
    """One piece of such state.

    Args:
        read: returns its value.
        write: sets it.
        owner: the replica whose value the process has after the run.
        initial: returns a replica's first value; by default the value of now, for all.
    """

    __slots__ = ("initial", "owner", "read", "values", "write")

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        owner: int,
        initial: Callable[[int], Any] | None = None,
    ) -> None:
        self.read, self.write, self.owner = read, write, owner
        self.values: dict[int, Any] = {}  # of the replicas that have had a turn
        if initial is None:
            before = read()
            self.initial: Callable[[int], Any] = lambda replica_id: before
        else:
            self.initial = initial

    def end(self, inside: int) -> None:
        """Gives the process the owner's value."""
        if inside != self.owner:
            values, owner = self.values, self.owner
            values[inside] = self.read()
            self.write(values[owner] if owner in values else self.initial(owner))


class SwappedState:
    """The replicas' values in one run.

    Args:
        first: the replica whose values are in the process.
        slots: what is swapped from the start of the run; ``add`` extends this list.
        keys: those of ``slots`` that ``add`` must not add again.

    Attributes:
        inside: the replica that has its values in the process.
    """

    __slots__ = ("_first", "_keys", "_slots", "inside")

    def __init__(self, first: int, slots: list[Slot], keys: Sequence[Hashable] = ()) -> None:
        self._first = self.inside = first
        self._slots = slots
        self._keys = set(keys) if keys else None

    def add(
        self,
        key: Hashable,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        owner: int | None = None,
    ) -> None:
        """Keeps a piece of state, from now on, for each replica; idempotent for equal keys."""
        if self._keys is None:
            self._keys = set()
        if key not in self._keys:
            self._slots.append(Slot(read, write, self._first if owner is None else owner))
            self._keys.add(key)

    def enter(self, replica_id: int) -> None:
        """Replaces the values in the process by a replica's values."""
        slots, inside = self._slots, self.inside
        for slot in slots:
            slot.values[inside] = slot.read()
        self.inside = replica_id  # before the values: [Note: Interrupts]
        for slot in slots:
            values = slot.values
            slot.write(values[replica_id] if replica_id in values else slot.initial(replica_id))

    def enter_first(self) -> None:
        """Gives the process the first replica's values."""
        if self.inside != self._first:
            self.enter(self._first)

    def end(self) -> None:
        """Gives the process the values of their owners; idempotent."""
        slots = self._slots
        while slots:
            slots[-1].end(self.inside)
            del slots[-1]
        self.inside = self._first
