"""Compares recorded runs: what differs first, beyond rounding.

Three runs are compared: on one device (A), under the strategy (C), and, where A and C are not as
good as equal, on one device with rounding errors added (B).

    distance of A and C                     counts as
    a few units in the last place           equal; B is not needed
    a few times the distance of A and B     rounding, which grows that much in this script
    more                                    a difference

Gradients are compared relative to those of the whole optimizer as well: one that is nothing but
rounding has no scale of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mirror.replica.exactness.output_comparison import TIGHT
from mirror.tools.check.fingerprint import Fingerprint, relative_distance
from mirror.tools.check.record import (
    BUFFER,
    GRADIENT,
    INPUT,
    LOSS,
    OUTPUT,
    PARAMETER,
    PART,
    Record,
    RecordedEvent,
)

_UNITS = {"float64": 2.0**-33, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


# No cause makes a difference as small as 1e-8, and float64 is there to leave rounding aside.
_SPREAD = 12.0  # times the spread of one device
_FEW = 40.0  # more of it, divided by how many numbers there are
_SMALL = 8  # numbers
_SHALLOW = (INPUT, OUTPUT, LOSS, GRADIENT, PARAMETER, BUFFER)


@dataclass(frozen=True)
class Difference:
    """A quantity that differs, or may.

    Attributes:
        index: of the event among those compared.
        one, many: the events of one device, and of the strategy; ``None`` where one lacks it.
        distance: relative to the norm on one device.
        reason: ``"values"``, ``"shape"``, ``"missing"`` or ``"other"``: another event came.
    """

    index: int
    one: RecordedEvent | None
    many: RecordedEvent | None
    distance: float
    reason: str = "values"
    print_many: Fingerprint | None = None

    @property
    def event(self) -> RecordedEvent:
        """The event of one device, or else of the strategy."""
        event = self.one or self.many
        assert event is not None
        return event


def shallow_events(record: Record) -> list[RecordedEvent]:
    """Returns the events outside modules, which every recording has."""
    return [e for e in record.events if e.depth == 0 and e.kind in _SHALLOW]


def deep_events(record: Record, step: int) -> list[RecordedEvent]:
    """Returns the events of one step, those inside modules among them."""
    return [e for e in record.events if e.step == step and e.kind != PART]


class Tolerances:
    """What counts as rounding.

    Args:
        one: the run on one device.
        given: the largest relative distance, or ``None`` for what is measured.
    """

    def __init__(self, one: Record, given: float | None = None) -> None:
        self._given = given
        halves = [d for d in one.dtypes if d in ("float16", "bfloat16")]
        self.unit = max((_UNITS[d] for d in halves), default=0.0)
        self._scales = _gradient_scales(one)

    def tight_distance(self, event: RecordedEvent) -> float:
        """Returns the absolute distance up to which rounding needs no second run to explain it."""
        a = event.prints[0]
        if self._given is not None:
            return self._given * self._reference_norm(event)
        unit = _UNITS.get(a.dtype, 2.0**-23)
        return TIGHT * unit * self._reference_norm(event)

    def _reference_norm(self, event: RecordedEvent) -> float:
        a = event.prints[0]
        norm = a.norm
        if event.kind == GRADIENT:
            scale = self._scales.get((event.step, event.info.get("optimizer")), 0.0)
            norm = max(norm, 0.03 * scale)
        return max(norm, 1e-12)


def _gradient_scales(one: Record) -> dict[tuple[int, object], float]:
    scales: dict[tuple[int, object], float] = {}
    for event in one.events:
        if event.kind == GRADIENT:
            key = event.step, event.info.get("optimizer")
            scales[key] = (scales.get(key, 0.0) ** 2 + event.prints[0].norm ** 2) ** 0.5
    return scales


def align(
    one: Sequence[RecordedEvent], many: Sequence[RecordedEvent]
) -> Iterator[tuple[int, RecordedEvent | None, RecordedEvent | None]]:
    """Yields the events that belong together, with the index of the first run's event.

    One run may lack some tensors of an output: a strategy does not join all of them. Ends after
    the first events that do not belong together.
    """
    i = j = 0
    while i < len(one) or j < len(many):
        a = one[i] if i < len(one) else None
        c = many[j] if j < len(many) else None
        if a is not None and c is not None and a.key == c.key and _part(a) == _part(c):
            yield i, a, c
            i, j = i + 1, j + 1
        elif a is not None and _part(a):
            i += 1
        elif c is not None and _part(c):
            j += 1
        else:
            yield i, a, c
            return


def find_differences(
    one: Sequence[RecordedEvent], many: Sequence[RecordedEvent], tolerances: Tolerances
) -> Iterator[Difference]:
    """Yields the differences above the tight tolerance, in order.

    Ends after the first event that has no counterpart.
    """
    for i, a, c in align(one, many):
        if a is None or c is None or a.key != c.key:
            reason = "missing" if a is None or c is None else "other"
            yield Difference(i, a, c, float("inf"), reason)
            return
        if not a.prints:
            continue
        distance, nearest = nearest_of(a.prints[0], c)
        if nearest is None:
            if (c.prints or c.depth == 0) and not c.info.get("is_apart"):
                yield Difference(i, a, c, float("inf"), "shape")
            continue
        if distance > tolerances.tight_distance(a) or a.prints[0].bits != nearest.bits:
            rel = relative_distance(distance, a.prints[0].norm)
            if not a.prints[0].is_float and a.prints[0].bits == nearest.bits:
                continue
            yield Difference(i, a, c, rel, "values", nearest)


def _part(event: RecordedEvent) -> int:
    """Returns which tensor of several an event is; 0 for the first."""
    return int(event.info.get("part", 0))


def nearest_of(whole: Fingerprint, event: RecordedEvent) -> tuple[float, Fingerprint | None]:
    """Returns the distance of the candidate that is nearest, and the candidate."""
    best, found = float("inf"), None
    for candidate in event.prints:
        if candidate.shape != whole.shape:
            continue
        distance = whole.distance(candidate)
        if found is None or distance < best:
            best, found = distance, candidate
    return best, found


def largest_spreads(
    one: Sequence[RecordedEvent], noisy: Sequence[RecordedEvent]
) -> dict[int, float]:
    """Returns how far rounding has carried each loss or small output up to each event.

    By the event's index, and relative to its norm. In a quantity of a few numbers rounding errors
    may cancel in one step, and do not in another.
    """
    largest: dict[tuple[str, str, str], float] = {}
    spreads: dict[int, float] = {}
    for i, a, b in align(one, noisy):
        if a is None or b is None or a.key != b.key or a.kind not in (LOSS, OUTPUT):
            continue
        plain, noisy_print = a.prints[0], b.prints[0]
        if plain.is_float and len(plain.values) <= _SMALL and plain.shape == noisy_print.shape:
            spread = relative_distance(plain.distance(noisy_print), plain.norm)
            largest[a.key] = max(largest.get(a.key, 0.0), spread if spread < 1 else 0.0)
            spreads[i] = largest[a.key]
    return spreads


def is_rounding(
    difference: Difference, one: RecordedEvent, spread: RecordedEvent | None, largest: float = 0.0
) -> bool:
    """Whether rounding explains a difference in this script.

    Args:
        spread: the same event of the run with rounding errors added.
        largest: what ``largest_spreads`` returns for the event.
    """
    if difference.reason != "values" or spread is None or not spread.prints:
        return False
    a, b, c = one.prints[0], spread.prints[0], difference.print_many
    if c is None or a.shape != b.shape:
        return False
    if a.num_bad != c.num_bad:
        return a.num_bad != b.num_bad
    if not a.is_float:
        return a.bits != b.bits and a.distance(c) <= 4 * a.distance(b) + 4
    factor = _SPREAD + _FEW / max(1, len(a.values))
    return a.distance(c) <= factor * max(a.distance(b), largest * a.norm)


def find_first_deep(
    one: Record, many: Record, spread: Record | None, step: int, tolerances: Tolerances
) -> tuple[Difference | None, list[RecordedEvent], list[RecordedEvent]]:
    """Returns the first difference inside the modules of one step, and that step's events."""
    one_events, many_events = deep_events(one, step), deep_events(many, step)
    noisy = [] if spread is None else deep_events(spread, step)
    for difference in find_differences(one_events, many_events, tolerances):
        b = None
        if difference.index < len(noisy) and difference.one is not None:
            candidate = noisy[difference.index]
            b = candidate if candidate.key == difference.one.key else None
        if difference.one is not None and is_rounding(difference, difference.one, b):
            continue
        if difference.reason == "shape" and difference.event.depth > 0:
            continue  # the parts of a state cannot be joined here; later events decide
        return difference, one_events, many_events
    return None, one_events, many_events
