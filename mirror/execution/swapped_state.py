"""State that the process has once, and each replica of a run for itself: a turn swaps it in.

Random generators, flags such as the default dtype, and the modes of modules are such state. While
replicas take turns, ``SwappedState`` keeps the values of the replicas that wait. A value is kept
from the moment on when a replica of the run first changes that state (generators: from the start
of the run), so a run that changes none has nothing to swap.

[Note: Random streams]
Each replica draws from a random stream of its own, although several share a generator.
Problem: simulated devices, and replicas on one GPU, share a generator, and all replicas share the
CPU's. So a replica's draws would depend on the others'.
Rule: the first replica that shares a generator continues its stream, as one device does. Any other
replica has a stream seeded by a checksum of the state at the start of the run and by its id. A
turn swaps the replica's stream in. ``merge_call`` and lazy modules draw from the first one.
Consequence: after the run the generator has the first replica's state, so ``torch.get_rng_state``
between runs saves everything. If only other replicas have drawn, one extra number is drawn, so
that they do not repeat theirs. A run of one replica, and replicas that run at once, draw as is:
see ``parallel_runs.py`` for how the draws of these are seen.
Several workers: a checksum of the state and the rank seed the worker's stream for an outermost
run. Then the state is restored: a shuffle or noise between runs is that of one device. Only the
first 8 bytes of the state count the runs. They hold the seed of ``torch.manual_seed``, no draw
reads them, and all copies of the state have them: a seed, ``fork_rng`` and checkpoints repeat a
run. That costs 12 us of a run: zlib and NumPy take a third of the time of hashlib and torch here.
A lazy module's first values continue the stream of before the run, as on one device.
The generators of a worker's GPUs get, for the run, the seeds of its replicas among those of all
workers. Their offsets go on, so what is drawn between runs is what one device draws.

Python's and numpy's generators stay shared: reading their states takes 20 and 80 us.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from mirror.base.mutex import call_without_collection
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.devices import generators_of, separate_streams, stream_seed


class Slot:
    """One piece of such state.

    Args:
        read: returns its value.
        write: sets it.
        owner: the replica whose value the process has after the run.
        initial: returns a replica's first value; by default the value of now, for all.
    """

    __slots__ = ("initial", "owner", "read", "values", "write")

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        owner: int,
        initial: Callable[[int], Any] | None = None,
    ) -> None:
        self.read, self.write, self.owner = read, write, owner
        self.values: dict[int, Any] = {}  # of the replicas that have had a turn
        if initial is None:
            before = read()
            self.initial: Callable[[int], Any] = lambda replica_id: before
        else:
            self.initial = initial

    def end(self, inside: int) -> None:
        """Gives the process the owner's value."""
        if inside != self.owner:
            values, owner = self.values, self.owner
            values[inside] = self.read()
            self.write(values[owner] if owner in values else self.initial(owner))


class SwappedState:
    """The replicas' values in one run.

    Args:
        first: the replica whose values are in the process.
        slots: what is swapped from the start of the run; ``add`` extends this list.
        keys: those of ``slots`` that ``add`` must not add again.

    Attributes:
        inside: the replica that has its values in the process.
    """

    __slots__ = ("_first", "_keys", "_slots", "inside")

    def __init__(self, first: int, slots: list[Slot], keys: Sequence[Hashable] = ()) -> None:
        self._first = self.inside = first
        self._slots = slots
        self._keys = set(keys) if keys else None

    def add(
        self,
        key: Hashable,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        owner: int | None = None,
    ) -> None:
        """Keeps a piece of state, from now on, for each replica; idempotent for equal keys."""
        if self._keys is None:
            self._keys = set()
        if key not in self._keys:
            self._slots.append(Slot(read, write, self._first if owner is None else owner))
            self._keys.add(key)

    def enter(self, replica_id: int) -> None:
        """Replaces the values in the process by a replica's values."""
        slots, inside = self._slots, self.inside
        for slot in slots:
            slot.values[inside] = slot.read()
        self.inside = replica_id  # before the values: [Note: Interrupts]
        for slot in slots:
            values = slot.values
            slot.write(values[replica_id] if replica_id in values else slot.initial(replica_id))

    def enter_first(self) -> None:
        """Gives the process the first replica's values."""
        if self.inside != self._first:
            self.enter(self._first)

    def end(self) -> None:
        """Gives the process the values of their owners; idempotent."""
        slots = self._slots
        while slots:
            slots[-1].end(self.inside)
            del slots[-1]
        self.inside = self._first


T = TypeVar("T")

_generator, _CPU = torch.default_generator, torch.device("cpu")
# As ``devices.generator_state``, one call less in every run.
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

    def state_of(self, replica_id: int) -> Tensor:
        """Returns the initial state of the replica's stream; the generator may get it, too."""
        if replica_id not in self.states:
            self.generator.manual_seed(stream_seed(zlib.crc32(self.base), replica_id))
            state = self.states[replica_id] = call_without_collection(self.generator.get_state)
            self.known[replica_id] = state.numpy().tobytes()
        return self.states[replica_id]


class RngPool:
    """The random streams of a group's runs, for replicas that take turns.

    All replicas may draw from the CPU's generator; from a GPU's, those that share the GPU.

    Args:
        devices: the replicas' devices.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._of_cpu = SeededStates(_generator, b"")  # of the last run
        self._of_gpus: list[tuple[SeededStates, torch.device, list[int]]] = []
        for device, generator in shared_generators(devices):
            sharers = [r for r, its in enumerate(devices) if its == device]
            self._of_gpus.append((SeededStates(generator, b""), device, sharers))

    def begin(self, active: Sequence[int]) -> SwappedState:
        """Returns the streams for a new run of several replicas."""
        base = _get_state().numpy().tobytes()
        if self._of_cpu.base != base:
            self._of_cpu = SeededStates(_generator, base)
        slots: list[Slot] = [RandomStreams(self._of_cpu, _get_state, active[0])]
        shared = list[torch.Generator]()
        for i, (seeded, device, sharers) in enumerate(self._of_gpus):
            drawing = [r for r in active if r in sharers]
            if len(drawing) > 1:
                read = partial(call_without_collection, seeded.generator.get_state)
                base = read().numpy().tobytes()
                if seeded.base != base:
                    seeded = SeededStates(seeded.generator, base)
                    self._of_gpus[i] = seeded, device, sharers
                streams = RandomStreams(seeded, read, drawing[0], device)
                streams.values[drawing[0]] = read()
                slots.append(streams)
                shared.append(seeded.generator)
        return SwappedState(active[0], slots, shared)


class RandomStreams(Slot):
    """The streams of the replicas that share one generator, in one run.

    Args:
        owner: the first of these replicas; it continues the generator's stream.
        device: that of the generator.
    """

    __slots__ = ("_device", "_seeded")

    def __init__(
        self,
        seeded: SeededStates,
        read: Callable[[], Tensor],
        owner: int,
        device: torch.device = _CPU,
    ) -> None:
        self.read, self.write = read, seeded.generator.set_state
        self.initial, self.owner = seeded.state_of, owner
        self.values, self._seeded, self._device = seeded.states.copy(), seeded, device
        self.values.pop(owner, None)  # as of another run, in which it was not the owner

    def end(self, inside: int) -> None:
        """Restores the owner's stream to the generator."""
        values, seeded = self.values, self._seeded
        if inside != self.owner:
            values[inside] = self.read()
            self.write(values[self.owner])
        for replica_id, begun in seeded.known.items():
            if replica_id in values and values[replica_id].numpy().tobytes() != begun:
                # Another replica has drawn.
                if self.read().numpy().tobytes() == seeded.base:
                    torch.empty((), device=self._device).random_(generator=seeded.generator)
                break


def shared_generators(
    devices: Sequence[torch.device],
) -> list[tuple[torch.device, torch.Generator]]:
    """Returns the GPUs that several replicas share, with their generators."""
    gpus = [d for d in dict.fromkeys(devices) if d.type == "cuda" and devices.count(d) > 1]
    return list(zip(gpus, generators_of(gpus), strict=True))


_states_before: WeakKeyDictionary[LocalWorkerGroup, Tensor] = WeakKeyDictionary()


def call_with_worker_rng(
    workers: LocalWorkerGroup,
    positions: Sequence[Sequence[torch.Generator]],
    call: Callable[[], T],
) -> T:
    """Calls a run that draws from its worker's streams.

    Args:
        positions: the generators of the worker's GPUs at each position.
    """
    seeds = list[tuple[torch.Generator, int]]()
    for generators in positions:
        separate_streams(generators)
        if workers.replica_offset:  # the first worker's draw as is
            seeds += ((generator, generator.initial_seed()) for generator in generators)
    for generator, seed in seeds:
        _set_seed(generator, stream_seed(seed, workers.replica_offset))
    before = _states_before[workers] = _get_state()
    _generator.manual_seed(stream_seed(zlib.crc32(before.numpy().tobytes()), 1 + workers.rank))
    try:
        return call()
    finally:
        after = _states_before.pop(workers)  # a lazy module may have drawn since
        after.numpy()[:8].view(np.int64)[0] += 1
        _generator.set_state(after)
        for generator, seed in seeds:
            _set_seed(generator, seed)


def _set_seed(generator: torch.Generator, seed: int) -> None:
    """Sets the seed of a GPU's generator, and not its offset: the state's first 8 bytes."""
    state = call_without_collection(generator.get_state)
    state.numpy()[:8].view(np.uint64)[0] = seed
    generator.set_state(state)


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
