"""WorkerStatus: the status that a worker publishes, and the detection of deadlocked workers.

[Note: Who waits in vain]
Workers start the operations of a link (a process group) in the same order and count them. A wait
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
    """Operation ``number`` of a link, for which a worker waits."""

    link: str
    number: int
    words: str


class Exit(NamedTuple):
    """How a strategy, or a program, has come to its end on a worker.

    Attributes:
        is_loss: whether that is because a worker was lost.
        words: what others are told.
    """

    is_loss: bool
    words: str


@dataclass(frozen=True)
class WorkerStatus:
    """Where a worker stands.

    Attributes:
        beat: how often it has said so.
        line: of the user's, where its main thread is.
        begun: by link, how many operations it has begun.
        waits: what it waits for, for a while already.
        ended: by the number of the strategy, of those that are over.
        num_open: how many strategies are not.
        end: of the program; ``None`` while it goes on.
        note: what else it has to say.
    """

    beat: int = 0
    line: str = ""
    begun: dict[str, int] = field(default_factory=dict)
    waits: tuple[PendingOp, ...] = ()
    ended: dict[str, Exit] = field(default_factory=dict)
    num_open: int = 0
    end: Exit | None = None
    note: str = ""

    def to_json(self) -> str:
        """Returns it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> WorkerStatus:
        """Returns what was said."""
        told = json.loads(text)
        told["waits"] = tuple(PendingOp(*wait) for wait in told["waits"])
        told["ended"] = {number: Exit(*end) for number, end in told["ended"].items()}
        told["end"] = told["end"] and Exit(*told["end"])
        return cls(**told)

    def end_of(self, link: str) -> Exit | None:
        """Returns why this worker begins no more operations of a link, if it does not."""
        return self.end or self.ended.get(link.partition("/")[0])

    def lacks(self, wait: PendingOp) -> bool:
        """Whether it has not begun what another one waits for."""
        return self.begun.get(wait.link, 0) < wait.number

    def where(self, strategy: str) -> str:
        """Returns it in words, for who uses that strategy."""
        waits = [wait.words for wait in self.waits]
        if (end := self.end or self.ended.get(strategy)) is not None:
            told = end.words
        elif waits:
            told = "waits in " + ", and in ".join(waits)
            told += "" if self.line in told else f", at {self.line}"
        else:
            told = f"goes on, last seen at {self.line or 'a place it has not told'}"
        return f"{told}; {self.note}" if self.note else told


def ended_without(wait: PendingOp, positions: Sequence[WorkerStatus]) -> list[tuple[int, Exit]]:
    """Returns the workers that ended without starting the awaited operation, by rank."""
    found = []
    for rank, position in enumerate(positions):
        end = position.end_of(wait.link)
        if end is not None and position.lacks(wait):
            found.append((rank, end))
    return found


def find_deadlocks(positions: Sequence[WorkerStatus]) -> frozenset[tuple[int, PendingOp]]:
    """Returns the waits that never end, by rank. See [Note: Who waits in vain]."""
    waits = {(rank, wait) for rank, position in enumerate(positions) for wait in position.waits}
    stuck = {rank for rank, _ in waits}

    def may_end(wait: PendingOp) -> bool:
        if ended_without(wait, positions):
            return True
        late = [rank for rank, position in enumerate(positions) if position.lacks(wait)]
        return stuck.isdisjoint(late)

    while ending := {rank for rank, wait in waits if may_end(wait)} & stuck:
        stuck -= ending
    return frozenset((rank, wait) for rank, wait in waits if rank in stuck)
