"""Random generators of simulated GPUs: one each, from which its random operations draw.

A generator is a seed and an offset, as CUDA's are: 16 bytes, of which every draw reads both and
raises the offset. Tensors are physically on the CPU, whose operations draw from the CPU's
generator. So an operation on a GPU's tensor runs with that one seeded by seed and offset; it gets
its own state back after that. ``torch.manual_seed``, ``torch.cuda.get_rng_state`` and
``set_rng_state``, ``fork_rng`` and activation checkpointing use ``torch.cuda.default_generators``,
and so these.
"""

from __future__ import annotations

import random
from operator import attrgetter

import numpy as np
import torch
from torch import Generator, Tensor

_CPU = torch.device("cpu")
_PER_DRAW = 4  # CUDA's offsets are multiples of it


class FakeGenerator(Generator):
    """What ``torch.cuda.default_generators`` has."""

    def __new__(cls, index: int) -> FakeGenerator:
        return super().__new__(cls)  # on the CPU

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._seed = self._offset = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def initial_seed(self) -> int:
        return self._seed

    def manual_seed(self, seed: int) -> Generator:
        self._seed, self._offset = seed % 2**64, 0
        return self

    def seed(self) -> int:
        return self.manual_seed(random.getrandbits(53)).initial_seed()

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> Generator:
        assert offset % _PER_DRAW == 0, offset
        self._offset = offset
        return self

    def get_state(self) -> Tensor:
        state = np.array([self._seed, self._offset], dtype=np.uint64)
        return torch.from_numpy(state.view(np.uint8))

    def set_state(self, state: Tensor) -> Generator:
        assert (state.dtype, state.shape) == (torch.uint8, (16,)), "a state of the CPU's generator"
        self._seed, self._offset = map(int, state.numpy().copy().view(np.uint64))
        return self

    def draw(self) -> int:
        """Returns the CPU's seed for the next draw."""
        number = hash((self._seed, self._offset)) % 2**63
        self._offset += _PER_DRAW
        return number


def draws(func) -> bool:
    """Whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def call_drawing(func, args, kwargs, device: torch.device):
    """Calls an operation that draws from the generator of a device, or from a given one."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Generator)]
    generators = [_fake_of(generator) for generator in given]
    for generator in generators:
        if generator.device != device:
            raise RuntimeError(
                f"Expected a '{device}' device type for generator but found '{generator.device}'"
            )
    if device == _CPU:
        return func(*args, **kwargs)
    own = generators[0] if given else torch.cuda.default_generators[device.index]
    assert isinstance(own, FakeGenerator)
    cpu = torch.default_generator

    def drawn(value):
        return cpu if isinstance(value, Generator) else value

    before = cpu.get_state()
    cpu.manual_seed(own.draw())
    try:
        return func(*map(drawn, args), **{key: drawn(value) for key, value in kwargs.items()})
    finally:
        cpu.set_state(before)


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
