"""The random streams of replicas that take turns on the CPU's one generator.

[Note: Streams of replicas]
Simulated devices share one generator. Were it drawn from in turns, what one replica draws would
depend on how many numbers the others have drawn before. So every replica of a run has a stream of
its own, which is put into the generator with the turn and taken out with it:

    the first replica   goes on with the generator's stream, as one device does
    any other           a stream seeded by a checksum of the state that the run began with, and by
                        its number

After the run the generator stands where the first replica has left it, so
``torch.get_rng_state`` between runs is all there is to save. If that replica has drawn nothing
and others have, one number is drawn for them, lest they draw the same again. What ``merge_call``
calls draws from the first replica's stream, and so do the initial values of a lazy module,
whoever calls it first. A run of one replica, and replicas that run at once, draw as they come.

Python's and numpy's generators stay shared: their states take 20 and 80 us to read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mirror.devices import random_state, set_random_state, stream_seed

_CPU = torch.device("cpu")


class Seeded:
    """The states that the replicas' streams begin with, for one state of the generator.

    A program that draws nothing leaves the generator as it is, and needs them anew in every run.
    """

    __slots__ = ("base", "states")

    def __init__(self, base: bytes) -> None:
        self.base = base
        self.states: dict[int, Tensor] = {}

    def put(self, replica_id: int) -> None:
        """Puts the replica's stream, at its beginning, into the generator."""
        if replica_id in self.states:
            set_random_state(_CPU, self.states[replica_id])
            return
        torch.default_generator.manual_seed(stream_seed(zlib.crc32(self.base), replica_id))
        self.states[replica_id] = random_state(_CPU)


class Streams:
    """The random streams of a group's runs.

    Args:
        are_apart: whether its replicas take turns on the CPU.
    """

    def __init__(self, are_apart: bool) -> None:
        self._are_apart = are_apart
        self._seeded = Seeded(b"")  # of the last run

    def begin(self, active: tuple[int, ...]) -> RandomStreams | None:
        """Returns the streams of a run that begins; ``None`` if it draws as it comes."""
        if not self._are_apart or len(active) < 2:
            return None
        state = random_state(_CPU)
        base = _bytes_of(state)
        if self._seeded.base != base:
            self._seeded = Seeded(base)
        return RandomStreams(self._seeded, active[0], state)


class RandomStreams:
    """The streams of the replicas of one run."""

    __slots__ = ("_first", "_seeded", "_states")

    def __init__(self, seeded: Seeded, first: int, state: Tensor) -> None:
        self._first = first
        self._seeded = seeded
        self._states = {first: state}

    def enter(self, replica_id: int) -> None:
        """Puts a replica's stream into the generator, with the turn."""
        if replica_id in self._states:
            set_random_state(_CPU, self._states[replica_id])
        else:
            self._seeded.put(replica_id)

    def leave(self, replica_id: int) -> None:
        """Takes a replica's stream out of the generator, before the turn goes."""
        self._states[replica_id] = random_state(_CPU)

    @contextmanager
    def of_first(self) -> Iterator[None]:
        """Has what is drawn meanwhile drawn from the first replica's stream."""
        self.enter(self._first)
        try:
            yield
        finally:
            self.leave(self._first)

    @contextmanager
    def for_all(self, replica_id: int) -> Iterator[None]:
        """Has what a replica, whose turn it is, draws meanwhile drawn from the first one's."""
        self.leave(replica_id)
        try:
            with self.of_first():
                yield
        finally:
            self.enter(replica_id)

    def end(self) -> None:
        """Leaves the generator where the first replica has left it."""
        self.enter(self._first)
        if _bytes_of(self._states[self._first]) == self._seeded.base and self._have_drawn():
            torch.empty((), device=_CPU).random_()

    def _have_drawn(self) -> bool:
        """Whether replicas but the first one have drawn."""
        begun = self._seeded.states
        return any(
            _bytes_of(state) != _bytes_of(begun[r])
            for r, state in self._states.items()
            if r in begun
        )


def _bytes_of(state: Tensor) -> bytes:
    return state.numpy().tobytes()
