"""WorkerStatus: the status that a worker publishes, and the detection of deadlocked workers.

[Note: Deadlocks of workers]
Workers start the operations of a group in the same order and count them. A wait
for operation n needs all workers to have started n. A worker that has not is running, and may
come; or has ended, which ends the wait with an error; or waits for another operation.
Rule: a wait may end if all missing workers may come, or if one of them has ended. A worker may
come if it runs, or if one of its waits (one per thread) may end. The remaining workers wait for
each other: a deadlock.

Counts only grow, so statuses read at different moments are enough for a suspicion. It counts as a
deadlock once a second read of all workers shows the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple


class PendingOp(NamedTuple):
    """Operation ``number`` of a process group, for which a worker waits; ``words`` describe it."""

    group: str
    number: int
    words: str


class Exit(NamedTuple):
    """How a strategy, or a program, has ended on a worker.

    Attributes:
        is_loss: whether a lost worker is the reason.
        words: the text for the other workers' messages.
    """

    is_loss: bool
    words: str


@dataclass(frozen=True)
class WorkerStatus:
    """The status of a worker.

    Attributes:
        beat: the number of statuses that it has published.
        line: the user's line that its main thread is at.
        started: the number of operations that it has started, by group.
        waits: the operations that its threads have waited for, for some time.
        ended: the ends of its strategies, by their number.
        num_open: the number of strategies that have not ended.
        end: the end of its program; None while it runs.
        note: a remark for the other workers' messages.
    """

    beat: int = 0
    line: str = ""
    started: dict[str, int] = field(default_factory=dict)
    waits: tuple[PendingOp, ...] = ()
    ended: dict[str, Exit] = field(default_factory=dict)
    num_open: int = 0
    end: Exit | None = None
    note: str = ""

    def to_json(self) -> str:
        """Returns the status as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> WorkerStatus:
        """Returns the status that ``to_json`` encoded."""
        values = json.loads(text)
        values["waits"] = tuple(PendingOp(*op) for op in values["waits"])
        values["ended"] = {number: Exit(*end) for number, end in values["ended"].items()}
        values["end"] = values["end"] and Exit(*values["end"])
        return cls(**values)

    def end_of(self, group: str) -> Exit | None:
        """Returns why this worker starts no more operations of a group, or None if it may."""
        return self.end or self.ended.get(group.partition("/")[0])

    def lacks(self, op: PendingOp) -> bool:
        """Returns whether this worker has not started an operation."""
        return self.started.get(op.group, 0) < op.number

    def describe(self, strategy: str) -> str:
        """Returns the status in words, for messages of a strategy."""
        waits = [op.words for op in self.waits]
        if (end := self.end or self.ended.get(strategy)) is not None:
            text = end.words
        elif waits:
            text = "waits in " + ", and in ".join(waits)
            text += "" if self.line in text else f", at {self.line}"
        else:
            text = f"goes on, last seen at {self.line or 'an unknown line'}"
        return f"{text}; {self.note}" if self.note else text


def find_ended_without(op: PendingOp, statuses: Sequence[WorkerStatus]) -> list[tuple[int, Exit]]:
    """Returns the workers that ended without starting an operation, by rank."""
    ends = []
    for rank, status in enumerate(statuses):
        end = status.end_of(op.group)
        if end is not None and status.lacks(op):
            ends.append((rank, end))
    return ends


def find_deadlocks(statuses: Sequence[WorkerStatus]) -> frozenset[tuple[int, PendingOp]]:
    """Returns the waits that never end, with their ranks; see [Note: Deadlocks of workers]."""
    waits = {(rank, op) for rank, status in enumerate(statuses) for op in status.waits}
    stuck = {rank for rank, _ in waits}

    def may_end(op: PendingOp) -> bool:
        if find_ended_without(op, statuses):
            return True
        late = [rank for rank, status in enumerate(statuses) if status.lacks(op)]
        return stuck.isdisjoint(late)

    while ending := {rank for rank, op in waits if may_end(op)} & stuck:
        stuck -= ending
    return frozenset((rank, op) for rank, op in waits if rank in stuck)
