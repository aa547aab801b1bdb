"""Random streams: each replica draws from its own, although the CPU has one generator.

Problem: simulated devices share a generator, so a replica's draws would depend on the others'.
Rule: the first replica continues the generator's stream, as one device does. Any other replica
has a stream seeded by a checksum of the state at the start of the run and by its id. A turn puts
the replica's stream into the generator. ``merge_call`` and lazy modules draw from the first one.
Consequence: after the run the generator has the first replica's state, so ``torch.get_rng_state``
between runs saves everything. If only other replicas have drawn, one extra number is drawn, so
that they do not repeat theirs. A run of one replica, and replicas that run at once, draw as is.
Several workers: a checksum of the state and the rank seed the worker's stream for an outermost
run. Then the state is restored: a shuffle or noise between runs is that of one device. Only the
first 8 bytes of the state count the runs. They hold the seed of ``torch.manual_seed``, no draw
reads them, and all copies of the state have them: a seed, ``fork_rng`` and checkpoints repeat a
run. That costs 12 us of a run: zlib and NumPy take a third of the time of hashlib and torch here.
A lazy module's first values continue the stream of before the run, as on one device.

Python's and numpy's generators stay shared: reading their states takes 20 and 80 us.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from mirror.base.mutex import call_without_collection
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.devices import generators_of, state_of, stream_seed

T = TypeVar("T")

_generator, _CPU = torch.default_generator, torch.device("cpu")
# As ``devices.state_of``, one call less in every run.
_get_state = partial(call_without_collection, _generator.get_state)


class SeededStates:
    """The initial states of the replicas' streams for one state of a generator.

    If a program draws nothing, the generator's state, and so these states, serve the next run.
    """

    __slots__ = ("base", "generator", "known", "states")

    def __init__(self, generator: torch.Generator, base: bytes) -> None:
        self.generator, self.base = generator, base
        self.states: dict[int, Tensor] = {}
        self.known: dict[int, bytes] = {}  # the same states as bytes

    def put(self, replica_id: int) -> None:
        """Puts the initial state of the replica's stream into the generator."""
        if replica_id in self.states:
            self.generator.set_state(self.states[replica_id])
            return
        self.generator.manual_seed(stream_seed(zlib.crc32(self.base), replica_id))
        state = self.states[replica_id] = call_without_collection(self.generator.get_state)
        self.known[replica_id] = state.numpy().tobytes()


class RngPool:
    """The random streams of a group's runs, for replicas that take turns.

    Args:
        devices: the replicas' devices. A GPU's generator has streams if replicas share it; the
            CPU's has, since all of them may draw from it.
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        everyone = range(len(devices))
        self._of_cpu = SeededStates(_generator, b"")
        self._shared: list[tuple[torch.Generator, torch.device, Sequence[int]]] = []
        for gpu in dict.fromkeys(devices):
            sharers = [r for r in everyone if devices[r] == gpu]
            if gpu.type == "cuda" and len(sharers) > 1:
                self._shared.append((generators_of([gpu])[0], gpu, sharers))
        self._seeded: dict[int, SeededStates] = {}  # the states of the last run

    def begin(self, active: Sequence[int]) -> ReplicaRng | ReplicaRngs:
        """Returns the streams for a new run of several replicas."""
        base = _get_state().numpy().tobytes()
        if self._of_cpu.base != base:
            self._of_cpu = SeededStates(_generator, base)
        streams = ReplicaRng(self._of_cpu, _CPU, active)
        if not self._shared:
            return streams
        found = [streams]
        for k, (generator, device, sharers) in enumerate(self._shared):
            mine = [r for r in active if r in sharers]
            if len(mine) > 1:
                base = state_of(generator).numpy().tobytes()
                if k not in self._seeded or self._seeded[k].base != base:
                    self._seeded[k] = SeededStates(generator, base)
                found.append(ReplicaRng(self._seeded[k], device, mine))
        return ReplicaRngs(found, active[0])


class ReplicaRngs:
    """The streams of the replicas of one run, of all generators that they share.

    Attributes:
        inside: the replica that has its streams in the generators.
    """

    __slots__ = ("_first", "_of_generators", "inside")

    def __init__(self, of_generators: Sequence[ReplicaRng], first: int) -> None:
        self._of_generators, self._first = of_generators, first
        self.inside = first

    def enter(self, replica_id: int) -> None:
        """Replaces the streams in the generators by a replica's streams."""
        for streams in self._of_generators:
            streams.enter(replica_id)
        self.inside = replica_id

    def enter_first(self) -> None:
        """Puts the first replica's stream into each generator."""
        for streams in self._of_generators:
            streams.enter_first()
        self.inside = self._first

    def end(self) -> None:
        """Restores the first replica's stream to each generator."""
        for streams in self._of_generators:
            streams.end()
        self.inside = self._first


class ReplicaRng:
    """The streams of the replicas that share one generator, in one run.

    Attributes:
        inside: the replica that has its stream in the generator.
    """

    __slots__ = ("_device", "_first", "_seeded", "_sharers", "_states", "inside")

    def __init__(self, seeded: SeededStates, device: torch.device, sharers: Sequence[int]) -> None:
        self._first = self.inside = sharers[0]
        self._seeded, self._device, self._sharers = seeded, device, sharers
        self._states: dict[int, Tensor] = {}  # the streams that were in the generator

    def enter(self, replica_id: int) -> None:
        """Replaces the stream in the generator by a replica's stream, if that shares it."""
        if replica_id == self.inside or replica_id not in self._sharers:
            return
        states, seeded = self._states, self._seeded
        states[self.inside] = call_without_collection(seeded.generator.get_state)
        self.inside = replica_id
        if replica_id in states:
            seeded.generator.set_state(states[replica_id])
        else:
            self._seeded.put(replica_id)

    def enter_first(self) -> None:
        """Puts the first replica's stream into the generator."""
        self.enter(self._first)

    def end(self) -> None:
        """Restores the first replica's stream to the generator."""
        if self.inside != self._first:
            self.enter(self._first)
        states = self._states
        for replica_id, begun in self._seeded.known.items():
            if replica_id in states and states[replica_id].numpy().tobytes() != begun:
                # Another replica has drawn.
                now = call_without_collection(self._seeded.generator.get_state)
                if now.numpy().tobytes() == self._seeded.base:
                    torch.empty((), device=self._device).random_(generator=self._seeded.generator)
                break


_states_before: WeakKeyDictionary[LocalWorkerGroup, Tensor] = WeakKeyDictionary()


def call_with_worker_rng(workers: LocalWorkerGroup, call: Callable[[], T]) -> T:
    """Calls a run that draws from its worker's stream."""
    before = _states_before[workers] = _get_state()
    _generator.manual_seed(stream_seed(zlib.crc32(before.numpy().tobytes()), 1 + workers.rank))
    try:
        return call()
    finally:
        after = _states_before.pop(workers)  # a lazy module may have drawn since
        after.numpy()[:8].view(np.int64)[0] += 1
        _generator.set_state(after)


@contextmanager
def stream_of_caller(workers: LocalWorkerGroup) -> Iterator[None]:
    """Within a run, draws continue worker 0's stream of before the run: for initial values."""
    if not workers.is_multi_process:
        yield
        return
    within = _get_state()
    own = _states_before.get(workers, within).numpy().tobytes()
    states = workers.exchange("the first values of a lazy module", None, lambda: own)
    _generator.set_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))
    try:
        yield
    finally:
        if workers in _states_before and states[0] == own:  # not of workers seeded differently
            _states_before[workers] = _get_state()
        _generator.set_state(within)
