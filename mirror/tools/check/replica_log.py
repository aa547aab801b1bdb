"""What each replica notes inside a call of a module, and how that becomes the events of a record.

The n-th event of one replica belongs to the n-th event of the others. Their tensors are joined in
every way that may give the whole one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mirror.tools.check.fingerprint import fingerprint, join_parts
from mirror.tools.check.record import LOSS, OP, OUTPUT, PART, RecordedEvent
from mirror.values import PerReplica

OUTSIDE = -1
"""The id, among those of replicas, of code that no replica runs."""
_MAX_EVENTS = 4000  # inside one outermost call
_MAX_NUMBERS = 30_000_000  # that are copied inside one outermost call
_MAX_DEPTH = 6  # of structures


@dataclass
class PendingEvent:
    """An event inside an outermost call, as one replica sees it."""

    kind: str
    name: str
    where: str
    depth: int
    info: dict[str, Any]
    tensors: list[Tensor] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is; equal for the same event of all replicas."""
        return self.kind, self.name, str(self.info.get("op", ""))


@dataclass
class ReplicaLog:
    """What one replica, or code outside replicas, is doing.

    Attributes:
        path: the modules that are being called, outermost first.
        events: those inside the outermost call.
        num_numbers: how many numbers their tensors have.
        num_steps: how many optimizer steps the replica has reached, inside ``run``.
        known: the tensors that the call was given or has made, by id, while functions of tensors
            are noted. The dict keeps them alive.
        is_busy: whether the recorder itself is computing.
    """

    path: list[nn.Module] = field(default_factory=list)
    events: list[PendingEvent] = field(default_factory=list)
    num_numbers: int = 0
    num_steps: int = 0
    known: dict[int, Tensor] | None = None
    is_busy: bool = False

    def add(self, event: PendingEvent, values: Any) -> None:
        """Notes an event, with copies of the tensors in ``values``."""
        if len(self.events) >= _MAX_EVENTS:
            return
        self.is_busy = True
        for tensor in tensors_in(values):
            self.num_numbers += tensor.numel()
            if self.num_numbers > _MAX_NUMBERS:
                break
            event.tensors.append(tensor.detach().clone())
        self.events.append(event)
        self.is_busy = False

    def know(self, tensors: Iterable[Any]) -> None:
        """Takes note that the call was given these tensors, or has made them."""
        if self.known is not None:
            self.known.update((id(t), t) for t in tensors if isinstance(t, Tensor))

    def clear(self) -> None:
        """Forgets the events."""
        self.events, self.num_numbers = [], 0


def joined_events(
    logs: Mapping[int, ReplicaLog], counts: Mapping[int, float], step: int
) -> Iterator[RecordedEvent]:
    """Yields the events of all replicas' logs, each with the replicas' tensors joined.

    Ends with an event "branch" where the replicas have taken different branches.

    Args:
        logs: by replica id, or ``OUTSIDE``; what is outside splits the replicas' call.
        counts: the replicas' numbers of examples.
    """
    ids = sorted(r for r, log in logs.items() if log.events)
    if len(ids) > 1 and ids[0] == OUTSIDE:
        del ids[0]
    rows = [logs[r].events for r in ids]
    for i in range(max(map(len, rows), default=0)):
        events = [row[i] for row in rows if i < len(row)]
        if len({event.key for event in events}) > 1 or len(events) < len(rows):
            first = events[0]
            branches = [f"{event.name} at {event.where}" for event in events]
            info = {"op": "branch", "branches": branches}
            yield RecordedEvent(step, OP, first.name, where=first.where, depth=1, info=info)
            return
        if ids == [OUTSIDE]:
            yield from _joined(events, None, step)
        else:
            yield from _joined(events, [counts.get(r, 1.0) for r in ids], step)


def _joined(
    events: Sequence[PendingEvent], counts: Sequence[float] | None, step: int
) -> Iterator[RecordedEvent]:
    """Yields one event for each tensor, or one without if there is none."""
    first = events[0]
    info = dict(first.info)
    if len(events) > 1:
        info["numbers_of_replicas"] = [event.info.get("numbers") for event in events]
        if first.info.get("outside"):
            info["outside_of_replicas"] = [event.info.get("outside") for event in events]
        is_value = first.kind in (LOSS, OUTPUT, PART, OP) and bool(first.tensors)
        if is_value and all(event.tensors[0].dim() == 0 for event in events):
            info["values_of_replicas"] = [float(event.tensors[0]) for event in events]
    if counts is not None:
        info["counts"] = [float(count) for count in counts]
    num_tensors = min(len(event.tensors) for event in events)
    for k in range(num_tensors):
        parts = [event.tensors[k] for event in events]
        if counts is None:
            prints, ways = [fingerprint(parts[0])], ["whole"]
        else:
            prints, ways = join_parts(parts, counts)
        yield RecordedEvent(
            step,
            first.kind,
            first.name,
            prints,
            ways,
            first.where,
            first.depth,
            {**info, "part": k},
        )
    if not num_tensors:
        yield RecordedEvent(
            step, first.kind, first.name, where=first.where, depth=first.depth, info=info
        )


def tensors_in(values: Any, found: list[Tensor] | None = None, depth: int = 0) -> list[Tensor]:
    """Returns the tensors in a structure, without those of a PerReplica."""
    found = [] if found is None else found
    if isinstance(values, Tensor):
        if not values.is_meta and not values.is_quantized:
            found.append(values)
    elif isinstance(values, PerReplica):
        pass  # parts that could not be joined
    elif depth < _MAX_DEPTH:
        children: Any = ()
        if isinstance(values, dict):
            children = list(values.values())
        elif isinstance(values, (list, tuple)):
            children = values
        elif hasattr(values, "__dataclass_fields__"):
            children = list(vars(values).values())
        for child in children:
            tensors_in(child, found, depth + 1)
    return found
