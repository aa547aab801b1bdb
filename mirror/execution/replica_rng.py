"""The random streams of replicas that take turns on the CPU's one generator.

[Note: Streams of replicas]
Simulated devices share one generator. Were it drawn from in turns, what one replica draws would
depend on how many numbers the others have drawn before. So every replica of a run has a stream of
its own, which is put into the generator with the turn; whose was there before is kept then:

    the first replica   goes on with the generator's stream, as one device does
    any other           a stream seeded by a checksum of the state that the run began with, and by
                        its number

After the run the generator stands where the first replica has left it, so
``torch.get_rng_state`` between runs is all there is to save. If that replica has drawn nothing
and others have, one number is drawn for them, lest they draw the same again. What ``merge_call``
calls draws from the first replica's stream, and so do the initial values of a lazy module. A run
of one replica, and replicas that run at once, draw as they come.

Python's and numpy's generators stay shared: their states take 20 and 80 us to read.

Where there are several workers, every outermost run begins with one number of the generator, and
leaves it as that number has left it: so what draws between runs, the order of a shuffled loader
for one, goes on alike on all workers. Within the run a worker draws from a stream that the number
and its rank seed. No stream is kept, so that seeding anew, and checkpoints, are as without others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.devices import state_of, stream_seed

T = TypeVar("T")

_generator = torch.default_generator


class SeededStates:
    """The states that the replicas' streams begin with, for one state of the generator.

    A program that draws nothing leaves the generator as it is, and needs them anew in every run.
    """

    __slots__ = ("base", "known", "states")

    def __init__(self, base: bytes) -> None:
        self.base = base
        self.states: dict[int, Tensor] = {}
        self.known: dict[int, bytes] = {}  # the same states

    def put(self, replica_id: int) -> None:
        """Puts the replica's stream, at its beginning, into the generator."""
        if replica_id in self.states:
            _generator.set_state(self.states[replica_id])
            return
        _generator.manual_seed(stream_seed(zlib.crc32(self.base), replica_id))
        state = self.states[replica_id] = state_of(_generator)
        self.known[replica_id] = state.numpy().tobytes()


class RngPool:
    """The random streams of a group's runs.

    Args:
        are_apart: whether its replicas take turns on the CPU.
    """

    def __init__(self, are_apart: bool) -> None:
        self.are_apart = are_apart
        self._seeded = SeededStates(b"")  # of the last run

    def begin(self, first: int) -> ReplicaRng:
        """Returns the streams of a run of several replicas that begins."""
        base = _state()
        if self._seeded.base != base:
            self._seeded = SeededStates(base)
        return ReplicaRng(self._seeded, first)


class ReplicaRng:
    """The streams of the replicas of one run.

    Attributes:
        inside: the replica whose stream is in the generator.
    """

    __slots__ = ("_first", "_seeded", "_states", "inside")

    def __init__(self, seeded: SeededStates, first: int) -> None:
        self._first = self.inside = first
        self._seeded = seeded
        self._states: dict[int, Tensor] = {}  # of those that were in the generator

    def enter(self, replica_id: int) -> None:
        """Puts a replica's stream into the generator, where another one's is."""
        states = self._states
        states[self.inside] = state_of(_generator)
        self.inside = replica_id
        if replica_id in states:
            _generator.set_state(states[replica_id])
        else:
            self._seeded.put(replica_id)

    def enter_first(self) -> None:
        """Has what is drawn from now on drawn from the first replica's stream."""
        if self.inside != self._first:
            self.enter(self._first)

    def end(self) -> None:
        """Leaves the generator where the first replica has left it."""
        self.enter_first()
        if self._others_have_drawn() and _state() == self._seeded.base:
            torch.empty((), device="cpu").random_()

    def _others_have_drawn(self) -> bool:
        for replica_id, begun in self._seeded.known.items():
            if replica_id in self._states:
                if self._states[replica_id].numpy().tobytes() != begun:
                    return True
        return False


def with_rng_of(workers: LocalWorkerGroup, call: Callable[[], T]) -> T:
    """Has a run draw from a stream of its worker. See [Note: Streams of replicas]."""
    seed = int(torch.randint(2**62, (), generator=_generator))
    after = state_of(_generator)
    _generator.manual_seed(stream_seed(seed, 1 + workers.rank))
    try:
        return call()
    finally:
        _generator.set_state(after)


@contextmanager
def same_seed(workers: LocalWorkerGroup) -> Iterator[None]:
    """Has what is drawn meanwhile, within a run, be what worker 0 draws: initial values."""
    if not workers.is_multi_process:
        yield
        return
    seed = int(torch.randint(2**62, (), generator=_generator))
    said = workers.exchange("the first values of a lazy module", None, lambda: b"%d" % seed)
    before = state_of(_generator)
    _generator.manual_seed(int(said[0]))
    try:
        yield
    finally:
        _generator.set_state(before)


def _state() -> bytes:
    return state_of(_generator).numpy().tobytes()
