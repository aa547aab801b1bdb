"""MembershipCoordinator: decides which workers form a generation, and when it is over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

from mirror.train.elastic.membership import (
    MemberRecord,
    MembershipStore,
    MemberState,
    Phase,
    View,
)

_log = logging.getLogger("mirror")

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
