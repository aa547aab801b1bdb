"""Membership: which processes train together; the coordinator decides, and all write it down.

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

Anyone can write to the store. So with a key, each value is ``MAC payload``; the MAC is the
HMAC-SHA256 of the session, the value's name and the payload, under the cluster's key (RFC 2104).
The session is a random number that the coordinator draws at its start: a value of an earlier
training at the same address is not valid in this one. Within a session an old value of the same
name is valid; readers must ignore what is older than what they know. Without a key the MAC is
empty, and values are checked for their form only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from time import monotonic
from typing import NamedTuple, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from mirror.errors import ClusterError, short_repr
from mirror.server.engine.socket_client import KEY_VARIABLE, key_of_environment

_log = logging.getLogger("mirror")

ADDRESS_VARIABLE = "MIRROR_ELASTIC_ADDRESS"  # HOST:PORT of the coordinator's store
NAME_VARIABLE = "MIRROR_ELASTIC_NAME"  # the name that an agent has given to its worker
_PREFIX = "mirror/elastic"
_MAX_NAME = 300  # characters
_MAX_NEW = 1000  # registrations that are looked for at a time: anyone can count further


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
    def from_json(cls, text: str) -> MemberRecord:
        """Returns the record that ``to_json`` encoded; raises ValueError for any other text."""
        match json.loads(text):
            case {
                "beat": int(beat),
                "state": str(state),
                "generation": int(generation),
                "rank": int(rank),
                "commit": [int(commit_generation), int(number)],
                "why": str(why),
                **others,
            } if not others:
                commit = CommitId(commit_generation, number)
                return cls(beat, MemberState(state), generation, rank, commit, why)
        raise ValueError(f"{short_repr(text)} is not a record of a worker")


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
    def from_json(cls, text: str) -> View:
        """Returns the view that ``to_json`` encoded; raises ValueError for any other text."""
        match json.loads(text):
            case {
                "generation": int(generation),
                "members": list(members),
                "phase": str(phase),
                "why": str(why),
                **others,
            } if not others and all(isinstance(name, str) for name in members):
                return cls(generation, tuple(members), Phase(phase), why)
        raise ValueError(f"{short_repr(text)} is not a view of the coordinator")

    def is_newer_than(self, other: View) -> bool:
        """Returns whether the coordinator has published this view after another one."""
        return (self.generation, _ORDER.index(self.phase)) > (
            other.generation,
            _ORDER.index(other.phase),
        )


_ORDER = (Phase.TRAINING, Phase.CHANGING, Phase.FORMING, Phase.ENDED)  # of one generation


class MembershipStore:
    """The keys of the coordinator's store.

    Every process that reaches the port can write there. So values have the form of a record, and,
    with a key in MIRROR_ENGINE_KEY, its signature; others are ignored.

    Args:
        is_coordinator: whether this process decides; others wait until the coordinator has begun.

    Raises:
        ClusterError: the coordinator has another key, or only one of the two has a key.
        WireError: the value of MIRROR_ENGINE_KEY is not a key.
    """

    def __init__(self, store: Store, *, is_coordinator: bool) -> None:
        self._store = PrefixStore(_PREFIX, store)
        key = key_of_environment() if os.environ.get(KEY_VARIABLE) else None
        self._signed = SignedStore(self._store, key)
        self._foreign: set[int] = set()
        if is_coordinator:
            self._signed.begin()
        else:
            self._signed.join()

    def write_view(self, view: View) -> None:
        """Publishes the view; only the coordinator calls it."""
        self._signed.write("view", view.to_json())

    def read_view(self) -> View | None:
        """Returns the view, or None before the coordinator has written one."""
        return self._signed.read("view", View.from_json)

    def register(self, name: str, record: MemberRecord) -> None:
        """Adds a worker to the list of all workers."""
        self.write_record(name, record)
        number = self._store.add("num_members", 1)
        self._signed.write(f"name/{number}", name)

    def write_record(self, name: str, record: MemberRecord) -> None:
        """Publishes a worker's record."""
        self._signed.write(f"member/{name}", record.to_json())

    def read_names(self, known: Collection[int]) -> dict[int, str]:
        """Returns the names of registered workers by number, without the known numbers."""
        total = min(self._store.add("num_members", 0), len(known) + len(self._foreign) + _MAX_NEW)
        found = {}
        for number in range(1, total + 1):
            # A worker may be killed between the writes of ``register``: a number may be empty.
            key = f"name/{number}"
            if number in known or number in self._foreign or not self._store.check([key]):
                continue
            name = self._signed.read(key, _parse_name)
            if name is None or self.read_records([name]) == {}:
                self._foreign.add(number)
            else:
                found[number] = name
        return found

    def read_records(self, names: Sequence[str]) -> dict[str, MemberRecord]:
        """Returns the valid records of workers."""
        keys = {name: f"member/{name}" for name in names}
        if not self._store.check(list(keys.values())):  # one was deleted
            keys = {name: key for name, key in keys.items() if self._store.check([key])}
        records = self._signed.read_all(list(keys.values()), MemberRecord.from_json)
        return {name: record for name, record in zip(keys, records, strict=True) if record}

    def write_death(self, name: str, why: str) -> None:
        """Publishes that a worker's process has ended; the agent that started it calls it."""
        self._signed.write(f"death/{name}", why)
        self._store.add("num_deaths", 1)

    def num_deaths(self) -> int:
        """Returns how often ``write_death`` was called."""
        return self._store.add("num_deaths", 0)

    def read_death(self, name: str) -> str | None:
        """Returns how a worker's process has ended, or None."""
        return self._signed.read(f"death/{name}", str)

    def write_lost(self, name: str) -> None:
        """Publishes that a worker counts as lost; its agent must end its process."""
        self._signed.write(f"lost/{name}", "lost")

    def is_lost(self, name: str) -> bool:
        """Returns whether ``write_lost`` was called."""
        return self._signed.read(f"lost/{name}", str) is not None


def generation_store(store: Store, generation: int) -> Store:
    """Returns the part of a coordinator's store for the process groups of a generation."""
    return PrefixStore(f"{_PREFIX}/generation/{generation}", store)


def _parse_name(text: str) -> str:
    if not 0 < len(text) <= _MAX_NAME or not text.isprintable():
        raise ValueError(f"{short_repr(text)} is not a worker's name")
    return text


T = TypeVar("T")

_SESSION = "session"


class SignedStore:
    """Reads and writes signed values; reports a value that is not valid once per name.

    Args:
        key: the key that all processes of the training have; None signs nothing.
    """

    def __init__(self, store: Store, key: bytes | None) -> None:
        self._store, self._key = store, key
        self._session = ""
        self._reported: set[str] = set()

    def begin(self) -> None:
        """Begins a session; only the coordinator calls it, before others read or write."""
        session = secrets.token_hex(16)
        self._session = ""
        self.write(_SESSION, session)
        self._session = session

    def join(self) -> None:
        """Takes part in the coordinator's session.

        Raises:
            ClusterError: the coordinator has another key, or only one of the two has a key.
        """
        self._session = ""
        session = self.read(_SESSION, str, wait=True)
        if session is None:
            raise ClusterError(
                "the coordinator of the elastic training has another key, or none; set the same "
                "MIRROR_ENGINE_KEY in all processes of the training, or in none"
            )
        self._session = session

    def write(self, name: str, payload: str) -> None:
        """Writes a value."""
        self._store.set(name, f"{self._mac(name, payload)} {payload}")

    def read(self, name: str, parse: Callable[[str], T], *, wait: bool = False) -> T | None:
        """Returns a parsed value; None if there is none, or it is not valid.

        Args:
            parse: raises ValueError for a payload that no process of the training writes.
            wait: whether to wait until there is one.
        """
        if not wait and not self._store.check([name]):
            return None
        return self._open(name, self._store.get(name), parse)

    def read_all(self, names: Sequence[str], parse: Callable[[str], T]) -> list[T | None]:
        """Returns the values of names that exist; None for each that is not valid."""
        values = self._store.multi_get(list(names)) if names else []
        return [self._open(name, value, parse) for name, value in zip(names, values, strict=True)]

    def _mac(self, name: str, payload: str) -> str:
        if self._key is None:
            return ""
        message = "\0".join(("mirror elastic", self._session, name, payload))
        return hmac.new(self._key, message.encode(), hashlib.sha256).hexdigest()

    def _open(self, name: str, value: bytes, parse: Callable[[str], T]) -> T | None:
        try:
            mac, _, payload = value.decode().partition(" ")
            if not hmac.compare_digest(mac.encode(), self._mac(name, payload).encode()):
                raise ValueError("it was written without this training's key")
            return parse(payload)
        except (ValueError, RecursionError) as error:
            if name not in self._reported:
                self._reported.add(name)
                _log.warning("%r in the store of the elastic training is ignored: %s", name, error)
            return None


DEFAULT_TIMEOUT_SECONDS = 10.0
DEFAULT_START_SECONDS = 600.0
# A worker that others have lost the connection to, and that is silent, too, is lost earlier.
_SUSPECT_SECONDS = 3.0
# A longer time between two reads is the coordinator's own silence: it was stopped, or its machine
# slept, and with it the store, so that no worker could publish.
_PAUSE_SECONDS = 1.0
# How long the first generation waits for more than the fewest workers; torchrun has the same.
_LAST_CALL_SECONDS = 30.0
_REPEAT_SECONDS = 1.0  # until a view that another process has overwritten is written again


@dataclass(frozen=True)
class MembershipOptions:
    """The rules for generations.

    Attributes:
        min_workers: fewer workers wait for others.
        max_workers: further workers wait as spares. The first generation waits 30 s for them.
        timeout_seconds: a worker that has been silent for so long is lost.
        start_seconds: how long to wait for ``min_workers``.
    """

    min_workers: int
    max_workers: int
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    start_seconds: float = DEFAULT_START_SECONDS


@dataclass
class _Member:
    """What the coordinator knows about a worker.

    Attributes:
        order: the number of its registration.
        heard: when its last new record was read.
        gone: why it is lost, or "".
    """

    order: int
    record: MemberRecord
    heard: float
    gone: str = ""

    @property
    def is_live(self) -> bool:
        return not self.gone and not self.record.state.is_end


class MembershipCoordinator:
    """Makes one generation after the other; see [Note: Generations].

    Args:
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        store: MembershipStore,
        options: MembershipOptions,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._store, self._options, self._clock = store, options, clock
        self._members: dict[str, _Member] = {}
        self._num_deaths = 0
        self._has_suspects = False
        self._forming_since = self._read_at = clock()
        self._publish(View(why="the training starts"))

    @property
    def has_live_members(self) -> bool:
        """Whether a worker runs that has neither left nor been lost."""
        return any(member.is_live for member in self._members.values())

    def step(self) -> View:
        """Reads what has happened, and publishes the next view if it differs; returns the view."""
        self._read()
        if self._clock() - self._published_at > _REPEAT_SECONDS:
            self._publish(self.view)
        if self.view.phase in (Phase.TRAINING, Phase.CHANGING):
            self._check_generation()
        if self.view.phase is Phase.FORMING:
            self._form()
        return self.view

    def end(self, why: str) -> None:
        """Ends the training with an error; "" is a success."""
        if self.view.phase is not Phase.ENDED:
            self._publish(replace(self.view, phase=Phase.ENDED, why=why))

    def _read(self) -> None:
        now = self._clock()
        pause, self._read_at = now - self._read_at, now
        if pause > _PAUSE_SECONDS:
            for member in self._members.values():
                member.heard += pause
        known = {member.order for member in self._members.values()}
        for number, name in self._store.read_names(known).items():
            self._members.setdefault(name, _Member(number, MemberRecord(beat=-1), now))
        num_deaths = self._store.num_deaths()
        live = [name for name, member in self._members.items() if member.is_live]
        for name, record in self._store.read_records(live).items():
            member = self._members[name]
            if record.beat > member.record.beat:  # an older one may be repeated by others
                member.record, member.heard = record, now
            silent = now - member.heard
            if silent > self._limit(name):
                member.gone = f"it has published nothing for {silent:.0f} s"
                self._store.write_lost(name)
        if num_deaths != self._num_deaths:
            self._num_deaths = num_deaths
            for name in live:
                why = self._store.read_death(name)
                if why is not None:
                    self._members[name].gone = why

    def _limit(self, name: str) -> float:
        """Returns how long a worker may be silent."""
        seconds = self._options.timeout_seconds
        is_suspect = self._has_suspects and name in self.view.members
        return min(seconds, _SUSPECT_SECONDS) if is_suspect else seconds

    def _check_generation(self) -> None:
        members = {name: self._members[name] for name in self.view.members}
        ended = [m.record for m in members.values() if m.record.state is MemberState.DIVERGED]
        if ended:
            self.end(ended[0].why)
        elif all(m.record.state is MemberState.FINISHED for m in members.values()):
            self.end("")
        elif lost := [name for name, member in members.items() if not member.is_live]:
            self._has_suspects = False
            self._begin_forming("; ".join(f"worker {n}: {self._why_gone(n)}" for n in lost))
        elif left := [name for name in members if self._is_waiting(name)]:
            self._has_suspects = self.view.phase is Phase.TRAINING
            self._begin_forming(f"worker {left[0]} has left the generation")
        elif self.view.phase is Phase.TRAINING and len(members) < self._options.max_workers:
            spares = [n for n, m in self._members.items() if m.is_live and n not in members]
            if any(map(self._is_waiting, spares)):
                self._publish(replace(self.view, phase=Phase.CHANGING, why="workers join"))

    def _why_gone(self, name: str) -> str:
        member = self._members[name]
        return member.gone or f"{member.record.state.value}: {member.record.why}"

    def _begin_forming(self, why: str) -> None:
        _log.warning("generation %d ends: %s", self.view.generation, why)
        self._forming_since = self._clock()
        self._publish(replace(self.view, phase=Phase.FORMING, why=why))

    def _is_waiting(self, name: str) -> bool:
        """Returns whether a worker waits for the next generation."""
        record = self._members[name].record
        is_old = name in self.view.members and record.generation < self.view.generation
        return record.state is MemberState.WAITING and not is_old

    def _form(self) -> None:
        live = [name for name, member in self._members.items() if member.is_live]
        waited = self._clock() - self._forming_since
        waiting = [name for name in live if self._is_waiting(name)]
        is_late = waited > self._options.start_seconds
        is_last_call = not self.view.generation and waited < _LAST_CALL_SECONDS
        if len(waiting) < len(live) and not is_late:
            return  # a live worker is still on its way
        wanted = self._options.max_workers if is_last_call else self._options.min_workers
        if len(waiting) < wanted:
            if is_late:
                self.end(
                    f"only {len(waiting)} of at least {self._options.min_workers} workers have "
                    f"come within {self._options.start_seconds:g} s; {self.view.why}"
                )
            return
        self._has_suspects = False
        waiting.sort(key=self._place)
        chosen = tuple(waiting[: self._options.max_workers])
        level = logging.WARNING if self.view.generation else logging.INFO
        _log.log(level, "generation %d: %s", self.view.generation + 1, ", ".join(chosen))
        self._publish(View(self.view.generation + 1, chosen, Phase.TRAINING))

    def _place(self, name: str) -> tuple[object, ...]:
        """Returns the sort key for ranks: worker 0 has the newest commit, and old workers stay."""
        member = self._members[name]
        record = member.record
        generation, number = record.commit
        return (-generation, -number, record.rank < 0, record.rank, member.order)

    def _publish(self, view: View) -> None:
        self.view, self._published_at = view, self._clock()
        self._store.write_view(view)
