"""The record of a run: its events in order, and how it ended. Written as JSON and arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mirror.tools.check.fingerprint import Fingerprint

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
    """

    events: list[RecordedEvent] = field(default_factory=list)
    num_steps: int = 0
    ending: str = "end"
    error: dict[str, Any] | None = None
    dtypes: list[str] = field(default_factory=list)
    processes: dict[str, Any] = field(default_factory=dict)
    output: str = ""

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
        deep_steps: the number of steps whose operations inside modules are recorded.
        rounding_noise: whether to add rounding errors, to see what becomes of them.
        no_dropout, double, sync_batch_norm: as in ``mirror check``.
    """

    replicas: int = 0
    devices: Sequence[str] | None = None
    steps: int = 20
    deep_steps: int = 3
    rounding_noise: bool = False
    no_dropout: bool = False
    double: bool = False
    sync_batch_norm: bool = False

    def to_json(self) -> str:
        """Returns it as the argument of a child process."""
        return json.dumps(asdict(self))
