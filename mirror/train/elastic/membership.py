"""Membership: which processes train together, as the coordinator and the workers write it down.

[Note: Generations]
A generation is a group of workers that train together, in a fixed order of ranks. There is one at
a time, and they are numbered from 1. One process, the coordinator, decides on all of them; so no
election is needed. Everything is in a TCPStore that the coordinator hosts and that outlives every
worker. The coordinator writes the ``View``, each worker its ``MemberRecord``, and an agent the
deaths of processes that it has started. No key has two writers.

    phase      meaning                                          it changes when
    FORMING    all live workers must come and wait              all have come: the next TRAINING
    TRAINING   the generation trains                            a worker is lost: FORMING
    CHANGING   it trains up to its next commit                  it has committed: FORMING
    ENDED      the training is over                             never

A worker is lost if its process has ended, or if it has published nothing for the timeout. A worker
that comes back after that, from SIGSTOP for example, is a new worker: its old connections are
closed, and the new generation has process groups of its own. A worker that has finished waits
until all have finished, because until then the others may still need its state.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

ADDRESS_VARIABLE = "MIRROR_ELASTIC_ADDRESS"  # HOST:PORT of the coordinator's store
NAME_VARIABLE = "MIRROR_ELASTIC_NAME"  # the name that an agent has given to its worker
_PREFIX = "mirror/elastic"


class Phase(str, Enum):
    """What the workers of the current generation do; see [Note: Generations]."""

    FORMING = "forming"
    TRAINING = "training"
    CHANGING = "changing"
    ENDED = "ended"


class MemberState(str, Enum):
    """What a worker does.

    ``FAILED``: its program has raised. ``DIVERGED``: it has raised because workers did different
    things, which another attempt would repeat.
    """

    WAITING = "waiting"
    TRAINING = "training"
    FINISHED = "finished"
    LEFT = "left"
    FAILED = "failed"
    DIVERGED = "diverged"

    @property
    def is_end(self) -> bool:
        """Whether the worker has left for good."""
        return self in (MemberState.LEFT, MemberState.FAILED, MemberState.DIVERGED)


class CommitId(NamedTuple):
    """The name of a commit: the generation that made it, and its number in the training.

    Of two commits the larger one is newer: after a roll back, numbers are used again.
    """

    generation: int = 0
    number: int = 0


NO_COMMIT = CommitId()


@dataclass(frozen=True)
class MemberRecord:
    """What a worker publishes.

    Attributes:
        beat: the number of records that it has published.
        state: what it does.
        generation: the generation that it trains in, or the last one that it knows to be over.
        rank: its rank in the last generation that it trained in; -1 for a new worker.
        commit: its newest commit.
        why: the reason for an end.
    """

    beat: int = 0
    state: MemberState = MemberState.WAITING
    generation: int = 0
    rank: int = -1
    commit: CommitId = NO_COMMIT
    why: str = ""

    def to_json(self) -> str:
        """Returns the record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> MemberRecord:
        """Returns the record that ``to_json`` encoded."""
        values = json.loads(text)
        values["state"] = MemberState(values["state"])
        values["commit"] = CommitId(*values["commit"])
        return cls(**values)


@dataclass(frozen=True)
class View:
    """What the coordinator publishes.

    Attributes:
        generation: the number of the current or last generation; 0 before the first.
        members: the names of its workers, by rank.
        phase: what they do.
        why: the reason for the phase; for ``ENDED`` the error, or "" after a success.
    """

    generation: int = 0
    members: tuple[str, ...] = ()
    phase: Phase = Phase.FORMING
    why: str = ""

    def to_json(self) -> str:
        """Returns the view as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> View:
        """Returns the view that ``to_json`` encoded."""
        values = json.loads(text)
        return cls(
            values["generation"], tuple(values["members"]), Phase(values["phase"]), values["why"]
        )


class MembershipStore:
    """The keys of the coordinator's store."""

    def __init__(self, store: Store) -> None:
        self.root = store
        self._store = PrefixStore(_PREFIX, store)

    def write_view(self, view: View) -> None:
        """Publishes the view; only the coordinator calls it."""
        self._store.set("view", view.to_json())

    def read_view(self) -> View | None:
        """Returns the view, or None before the coordinator has written one."""
        return View.from_json(self._store.get("view")) if self._store.check(["view"]) else None

    def register(self, name: str, record: MemberRecord) -> None:
        """Adds a worker to the list of all workers."""
        self.write_record(name, record)
        number = self._store.add("num_members", 1)
        self._store.set(f"name/{number}", name)

    def write_record(self, name: str, record: MemberRecord) -> None:
        """Publishes a worker's record."""
        self._store.set(f"member/{name}", record.to_json())

    def read_names(self, known: Collection[int]) -> dict[int, str]:
        """Returns the names of registered workers by number, without the known numbers."""
        total = self._store.add("num_members", 0)
        # A worker may be killed between the two writes of ``register``, so a number may be empty.
        return {
            number: self._store.get(f"name/{number}").decode()
            for number in range(1, total + 1)
            if number not in known and self._store.check([f"name/{number}"])
        }

    def read_records(self, names: Sequence[str]) -> dict[str, MemberRecord]:
        """Returns the records of registered workers."""
        if not names:
            return {}
        texts = self._store.multi_get([f"member/{name}" for name in names])
        return dict(zip(names, map(MemberRecord.from_json, texts), strict=True))

    def write_death(self, name: str, why: str) -> None:
        """Publishes that a worker's process has ended; the agent that started it calls it."""
        self._store.set(f"death/{name}", why)
        self._store.add("num_deaths", 1)

    def num_deaths(self) -> int:
        """Returns how often ``write_death`` was called."""
        return self._store.add("num_deaths", 0)

    def read_death(self, name: str) -> str | None:
        """Returns how a worker's process has ended, or None."""
        key = f"death/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def write_lost(self, name: str) -> None:
        """Publishes that a worker counts as lost; its agent must end its process."""
        self._store.set(f"lost/{name}", "")

    def is_lost(self, name: str) -> bool:
        """Returns whether ``write_lost`` was called."""
        return self._store.check([f"lost/{name}"])

    def generation_store(self, generation: int) -> Store:
        """Returns the part of the store for the process groups of a generation."""
        return PrefixStore(f"{_PREFIX}/generation/{generation}", self.root)
