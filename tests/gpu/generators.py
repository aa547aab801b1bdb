"""Random generators of simulated GPUs: one each, from which its random operations draw.

A generator is a seed and an offset, as CUDA's are: 16 bytes, of which every draw reads both and
raises the offset, by more if more numbers are drawn. Tensors are physically on the CPU, whose
operations draw from the CPU's generator. So an operation on a GPU's tensor runs with that one
seeded by seed and offset; it gets its own state back after that. ``torch.manual_seed``,
``torch.cuda.get_rng_state`` and ``set_rng_state``, ``fork_rng`` and activation checkpointing use
``torch.cuda.default_generators``, and so these.

A CUDA graph keeps the offsets of its draws within the graph: see Note [CUDA Graph-safe RNG states]
of torch. A launch adds those to the generator's offset of then, and raises that by their sum. So
a graph draws what its operations, called one by one, would draw. As in torch up to 2.12, a capture
that ends in an error leaves the generator unusable until another capture of its GPU has ended.
"""

from __future__ import annotations

import math
import random
from operator import attrgetter

import numpy as np
import torch
from torch import Generator, Tensor

_CPU = torch.device("cpu")
_PER_DRAW = 4  # CUDA's offsets are multiples of it
_NUM_THREADS = 64  # each draws four numbers; a real GPU has some 100,000


class FakeGenerator(Generator):
    """What ``torch.cuda.default_generators`` has."""

    def __new__(cls, index: int) -> FakeGenerator:
        return super().__new__(cls)  # on the CPU

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._seed = self._offset = self._in_graph = 0
        self._graph: object = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def begin_capture(self, graph: object) -> None:
        """Has draws count as those of a graph, from offset 0 on."""
        self._graph, self._in_graph = graph, 0

    def end_capture(self) -> int:
        """Returns by how much a launch raises the offset."""
        self._graph = None
        return self._in_graph

    def initial_seed(self) -> int:
        self._refuse_in_capture()
        return self._seed

    def manual_seed(self, seed: int) -> Generator:
        self._refuse_in_capture()
        self._seed, self._offset = seed % 2**64, 0
        return self

    def seed(self) -> int:
        return self.manual_seed(random.getrandbits(53)).initial_seed()

    def get_offset(self) -> int:
        self._refuse_in_capture()
        return self._offset

    def set_offset(self, offset: int) -> Generator:
        self._refuse_in_capture()
        assert offset % _PER_DRAW == 0, offset
        self._offset = offset
        return self

    def get_state(self) -> Tensor:
        self._refuse_in_capture()
        state = np.array([self._seed, self._offset], dtype=np.uint64)
        return torch.from_numpy(state.view(np.uint8))

    def set_state(self, state: Tensor) -> Generator:
        self._refuse_in_capture()
        assert (state.dtype, state.shape) == (torch.uint8, (16,)), "a state of the CPU's generator"
        self._seed, self._offset = map(int, state.numpy().copy().view(np.uint64))
        return self

    def draw(self, count: int = 1) -> int:
        """Returns the CPU's seed for the next draw, of some numbers."""
        if self._graph is not None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        number = self.number_at(self._offset)
        self._offset += _increment(count)
        return number

    def draw_in_graph(self, count: int) -> int:
        """Returns the offset of a draw in the graph that is captured."""
        offset = self._in_graph
        self._in_graph += _increment(count)
        return offset

    def begin_launch(self, increment: int) -> int:
        """Returns the offset of a graph's first draw; the next draw comes after its last one."""
        if self._graph is not None and increment:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        offset = self._offset
        self._offset += increment
        return offset

    def number_at(self, offset: int) -> int:
        """Returns the CPU's seed for the draw at an offset."""
        return hash((self._seed, offset)) % 2**63

    def _refuse_in_capture(self) -> None:
        if getattr(self._graph, "is_under_way", False):
            raise RuntimeError("Cannot use a CUDA generator during graph capture")


def _increment(count: int) -> int:
    return _PER_DRAW * (1 + (count - 1) // (_PER_DRAW * _NUM_THREADS))


def draws(func) -> bool:
    """Whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def call_drawing(func, args, kwargs, device: torch.device):
    """Calls an operation that draws from the generator of a device, or from a given one."""
    if device == _CPU:
        generator_of(args, kwargs, device)
        return func(*args, **kwargs)
    own = generator_of(args, kwargs, device)
    assert isinstance(own, FakeGenerator)
    return call_seeded(func, args, kwargs, own.draw(_count(args)))


def call_seeded(func, args, kwargs, number: int):
    """Calls an operation that draws, with the CPU's generator seeded by a number."""
    cpu = torch.default_generator

    def drawn(value):
        return cpu if isinstance(value, Generator) else value

    before = cpu.get_state()
    cpu.manual_seed(number)
    try:
        return func(*map(drawn, args), **{key: drawn(value) for key, value in kwargs.items()})
    finally:
        cpu.set_state(before)


def generator_of(args, kwargs, device: torch.device) -> Generator:
    """Returns the generator that an operation on a device draws from."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Generator)]
    generators = [_fake_of(generator) for generator in given]
    for generator in generators:
        if generator.device != device:
            raise RuntimeError(
                f"Expected a '{device}' device type for generator but found '{generator.device}'"
            )
    if generators:
        return generators[0]
    cpu = torch.default_generator
    return cpu if device == _CPU else torch.cuda.default_generators[device.index]


def draw_in_graph(func, args, kwargs, device: torch.device) -> tuple[FakeGenerator, int]:
    """Returns the generator of an operation in a capture, and the offset of its draw there."""
    own = generator_of(args, kwargs, device)
    if own is not torch.cuda.default_generators[device.index]:
        raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
    assert isinstance(own, FakeGenerator)
    return own, own.draw_in_graph(_count(args))


def _count(args) -> int:
    """Returns about how many numbers an operation draws: one for each element."""
    shapes = [a.shape if isinstance(a, Tensor) else a for a in args]
    shapes = [shape for shape in shapes if isinstance(shape, (list, tuple))]
    return max([1, *[math.prod(s) for s in shapes if all(isinstance(n, int) for n in s)]])


def _fake_of(generator: Generator) -> Generator:
    """Returns the fake of a generator; operations get another object of the same generator."""
    address = attrgetter("_cdata")
    fakes = (own for own in torch.cuda.default_generators if address(own) == address(generator))
    return next(fakes, generator)


def of_cuda_random(streams) -> list[tuple[object, str, object]]:
    """Returns what ``torch.cuda.random`` has imported by name, as module, name and stand-in."""
    fakes = {
        "_lazy_init": lambda: None,
        "current_device": streams.current_device,
        "device_count": lambda: streams.num_devices,
        "is_initialized": lambda: True,
    }
    return [(torch.cuda.random, name, value) for name, value in fakes.items()]
