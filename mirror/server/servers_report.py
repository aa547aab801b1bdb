"""The report of a parameter-server strategy: steps, updates, traffic, times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mirror.base.pictures import COLOURS, TablePart, table_of
from mirror.base.timeline import FORWARD, INPUT, REDUCTION

_BAR = 30


@dataclass
class Traffic:
    """The bytes and seconds of pulls and pushes."""

    pulled_bytes: int = 0
    pushed_bytes: int = 0
    pull_seconds: float = 0.0
    push_seconds: float = 0.0
    num_pulls: int = 0
    num_pushes: int = 0

    def add(self, other: Mapping[str, Any]) -> None:
        """Adds the numbers of another process, as ``take`` returns them."""
        for name, value in other.items():
            setattr(self, name, getattr(self, name) + value)

    def take(self) -> dict[str, Any]:
        """Returns the numbers, and resets them to zero."""
        numbers = asdict(self)
        vars(self).update(vars(Traffic()))
        return numbers


@dataclass(frozen=True)
class ServersReport:
    """Counts since the strategy was created; ``print`` shows a table.

    Attributes:
        num_steps: the number of scheduled steps that have ended.
        num_retried: how often a step ran again because its worker was lost.
        num_updates: the number of applied gradients or, if synchronous, of updates.
        num_dropped: the number of gradients that came too late.
        num_waiting: the number of gradients that wait for the next synchronous update.
        staleness: counts gradients by the number of updates that they were late.
        pulled_bytes, pushed_bytes: the sums over all workers.
        pull_seconds, push_seconds: the sums over all workers.
        step_seconds: the same for whole steps, pulls and pushes included.
        server_bytes: the size of each server's values, without optimizer states.
    """

    num_steps: int = 0
    num_retried: int = 0
    num_updates: int = 0
    num_dropped: int = 0
    num_waiting: int = 0
    staleness: Mapping[int, int] | None = None
    pulled_bytes: int = 0
    pushed_bytes: int = 0
    pull_seconds: float = 0.0
    push_seconds: float = 0.0
    step_seconds: float = 0.0
    server_bytes: tuple[int, ...] = ()

    def __str__(self) -> str:
        steps = max(1, self.num_steps)
        step = (
            f"a step          {self.step_seconds / steps * 1e3:.2f} ms, of which pull "
            f"{self.pull_seconds / steps * 1e3:.2f}, push {self.push_seconds / steps * 1e3:.2f}"
        )
        counts, updates, *rest = self._lines()
        return "\n".join([counts, updates, step, *rest])

    def _repr_html_(self) -> str:
        steps = max(1, self.num_steps)
        rest = max(0.0, self.step_seconds - self.pull_seconds - self.push_seconds)
        parts = [
            TablePart("pull", self.pull_seconds / steps, COLOURS[INPUT]),
            TablePart("push", self.push_seconds / steps, COLOURS[REDUCTION]),
            TablePart("on the worker", rest / steps, COLOURS[FORWARD]),
        ]
        title = f"a step, mean of {self.num_steps}, on servers and workers"
        return table_of(title, self.step_seconds / steps, parts, list(self._lines()))

    def _lines(self) -> Iterator[str]:
        """Yields the lines that have no times."""
        steps = max(1, self.num_steps)
        yield f"steps           {self.num_steps}, {self.num_retried} times again on another worker"
        yield (
            f"updates         {self.num_updates}, gradients dropped: {self.num_dropped}, waiting: "
            f"{self.num_waiting}"
        )
        yield (
            f"bytes a step    pulled {self.pulled_bytes / steps:.0f}, pushed "
            f"{self.pushed_bytes / steps:.0f}"
        )
        yield f"servers         {', '.join(f'{size} bytes' for size in self.server_bytes)}"
        yield "staleness       gradients"
        most = max((self.staleness or {0: 1}).values())
        for late, count in sorted((self.staleness or {}).items()):
            yield f"{late:>9}       {count:<8} {'#' * round(_BAR * count / most)}"
