"""The only clock: interleaved timing of several callables, and their ratios pair by pair."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True)
class Samples:
    """Seconds of repeated measurements, in the order they were taken."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The lower and upper quartile."""
        quartiles = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return quartiles[0], quartiles[2]

    def over(self, other: Samples) -> Samples:
        """Returns the ratios to ``other``, pair by pair: a drift is in both numbers of a pair."""
        return Samples(tuple(a / b for a, b in zip(self.seconds, other.seconds, strict=True)))

    def per(self, count: int) -> Samples:
        return Samples(tuple(seconds / count for seconds in self.seconds))


class Elsewhere:
    """A candidate that another process times: calling it gives the seconds it took there."""

    def __init__(self, call: Callable[[], float]) -> None:
        self.call = call


def seconds_of(candidate: Callable[[], object] | Elsewhere) -> float:
    """Runs a candidate once and returns the seconds."""
    if isinstance(candidate, Elsewhere):
        return candidate.call()
    start = perf_counter()
    candidate()
    return perf_counter() - start


def interleaved(
    candidates: Mapping[str, Callable[[], object] | Elsewhere], *, rounds: int, warmup: int = 3
) -> dict[str, Samples]:
    """Times each callable once per round, in turn, so that all see the same machine.

    The order within a round alternates: the second callable finds the caches of the first.
    """
    for _ in range(warmup):
        for candidate in candidates.values():
            seconds_of(candidate)
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            names = list(candidates)
            for name in names if i % 2 == 0 else reversed(names):
                taken[name].append(seconds_of(candidates[name]))
    finally:
        gc.enable()
    return {name: Samples(tuple(seconds)) for name, seconds in taken.items()}
