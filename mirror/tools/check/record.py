"""The record of a run: its events in order, and how it ended. Written as JSON and arrays.

A ``ReplicaLog`` has the events of one replica inside a call of a module. The n-th event of one
replica belongs to the n-th event of the others, and their tensors are joined in every way that may
give the whole one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from mirror.base.containers import leaves_in
from mirror.tools.check.fingerprint import Fingerprint, fingerprint, join_parts
from mirror.values import PerReplica

# What an event is of, in the order in which one step has them.
INPUT = "input"  # of a module's call
OP = "operation"  # a function of tensors that a module's forward calls
OUTPUT = "output"  # of a module's call
PART = "part"  # what each replica returns of a split call; one device has no such event
LOSS = "loss"  # where a backward pass begins
GRADIENT = "gradient"  # as the optimizer sees it
PARAMETER = "parameter"  # after the optimizer's step
BUFFER = "buffer"  # likewise


@dataclass
class RecordedEvent:
    """One quantity of one step.

    Attributes:
        step: the optimizer step that it belongs to, from 1.
        kind: one of the constants above.
        name: of the module, parameter or buffer, with its path in the model.
        prints: the fingerprints that it may be compared by: one on one device; under a strategy
            one for each way in which the replicas' parts can be joined.
        ways: how each of these was joined.
        where: the user's line, ``file:line in function``.
        depth: 0 for what the script itself calls, above that inside a module.
        info: more for the diagnosis: the class of a module, the name and numbers of an operation.
    """

    step: int
    kind: str
    name: str
    prints: list[Fingerprint] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)
    where: str = ""
    depth: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is; runs that take the same way have the same keys in the same order."""
        return self.kind, self.name, str(self.info.get("op", ""))


@dataclass
class Record:
    """A recorded run.

    Attributes:
        num_steps: the optimizer steps that it took.
        ending: ``"steps"``, all that were asked for; ``"end"``, the script ended; ``"error"``.
        error: the type, message, line and exit code of what ended it, if it was an error.
        dtypes: the floating dtypes that were seen.
        processes: what it started: forked children, and steps that these took.
        output: what it printed, and the warnings of mirror.
        unequal_calls: the split calls whose outputs differ from one device's, in sentences.
    """

    events: list[RecordedEvent] = field(default_factory=list)
    num_steps: int = 0
    ending: str = "end"
    error: dict[str, Any] | None = None
    dtypes: list[str] = field(default_factory=list)
    processes: dict[str, Any] = field(default_factory=dict)
    output: str = ""
    unequal_calls: list[str] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Writes it to a folder."""
        arrays: list[Any] = []
        events = []
        for event in self.events:
            row = {k: v for k, v in vars(event).items() if k != "prints"}
            row["prints"] = [
                [list(f.shape), f.dtype, len(f.values), f.num_bad, f.bits] for f in event.prints
            ]
            arrays += [f.values for f in event.prints]
            events.append(row)
        whole = {**{k: v for k, v in vars(self).items() if k != "events"}, "events": events}
        np.save(folder / "values.npy", np.concatenate(arrays) if arrays else np.zeros(0))
        (folder / "record.json").write_text(json.dumps(whole))

    @classmethod
    def load(cls, folder: Path) -> Record:
        """Reads what ``save`` has written."""
        whole = json.loads((folder / "record.json").read_text())
        values, at = np.load(folder / "values.npy"), 0
        events = []
        for row in whole.pop("events"):
            prints = []
            for shape, dtype, num, bad, bits in row.pop("prints"):
                prints.append(Fingerprint(tuple(shape), dtype, values[at : at + num], bad, bits))
                at += num
            events.append(RecordedEvent(prints=prints, **row))
        return cls(events=events, **whole)


@dataclass(frozen=True)
class RecordOptions:
    """How a run is recorded.

    Attributes:
        replicas: simulated devices; 0: one device, without a strategy.
        devices: the names of the replicas' devices, instead.
        steps: the number of optimizer steps after which the script is ended.
        rounding_noise: whether to add rounding errors, to see what becomes of them.
        no_dropout, double, sync_batch_norm: as in ``mirror check``.
    """

    replicas: int = 0
    devices: Sequence[str] | None = None
    steps: int = 20
    rounding_noise: bool = False
    no_dropout: bool = False
    double: bool = False
    sync_batch_norm: bool = False

    def to_json(self) -> str:
        """Returns it as the argument of a child process."""
        return json.dumps(asdict(self))


OUTSIDE = -1
"""The id, among those of replicas, of code that no replica runs."""
_MAX_EVENTS = 4000  # inside one outermost call
_MAX_NUMBERS = 30_000_000  # that are copied inside one outermost call


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
        known: the tensors that the call was given or has made, by id, while functions of tensors
            are recorded. The dict keeps them alive.
        is_busy: whether the recorder itself is computing.
    """

    path: list[nn.Module] = field(default_factory=list)
    events: list[PendingEvent] = field(default_factory=list)
    num_numbers: int = 0
    known: dict[int, Tensor] | None = None
    is_busy: bool = False

    def add(self, event: PendingEvent, values: Any) -> None:
        """Records an event, with copies of the tensors in ``values``."""
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

    def add_known(self, tensors: Iterable[Any]) -> None:
        """Records tensors that the call was given, or has made."""
        if self.known is not None:
            self.known.update((id(t), t) for t in tensors if isinstance(t, Tensor))

    def clear(self) -> None:
        """Forgets the events."""
        self.events, self.num_numbers = [], 0


def join_events(
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
            yield from _join_events(events, None, step)
        else:
            yield from _join_events(events, [counts.get(r, 1.0) for r in ids], step)


def _join_events(
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


def tensors_in(values: Any) -> list[Tensor]:
    """Returns the tensors in a structure, without those of a PerReplica."""
    return [value for value in tensors_or_parts_in(values) if isinstance(value, Tensor)]


def tensors_or_parts_in(values: Any) -> list[Tensor | PerReplica[Any]]:
    """Returns the tensors in a structure, and each PerReplica of tensors as it is."""
    found: list[Tensor | PerReplica[Any]] = []
    for leaf in leaves_in(values):
        if isinstance(leaf, PerReplica):
            found += [leaf] if all(isinstance(part, Tensor) for _, part in leaf.parts()) else []
        elif isinstance(leaf, Tensor) and leaf.is_nested:
            found += leaf.unbind()
        elif isinstance(leaf, Tensor) and not (leaf.is_meta or leaf.is_quantized):
            found.append(leaf)
    return found
