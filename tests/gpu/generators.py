"""Random generators of simulated GPUs: one each, from which its random operations draw.

Tensors are physically on the CPU, whose operations draw from the CPU's generator. So an operation
on a GPU's tensor runs with the state of that GPU's generator in the CPU's, which gets its own back
after that. ``torch.manual_seed``, ``torch.cuda.get_rng_state`` and ``set_rng_state``, ``fork_rng``
and activation checkpointing use ``torch.cuda.default_generators``, and so these. Their states are
those of a CPU's generator, 5,056 bytes; CUDA's are a seed and an offset, 16 bytes.
"""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Generator

_CPU = torch.device("cpu")


class FakeGenerator(Generator):
    """What ``torch.cuda.default_generators`` has."""

    def __new__(cls, index: int) -> FakeGenerator:
        return super().__new__(cls)  # on the CPU

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


def draws(func) -> bool:
    """Whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def call_drawing(func, args, kwargs, device: torch.device):
    """Calls an operation that draws from the generator of a device, or from a given one."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Generator)]
    for generator in given:
        found = _device_of(generator)
        if found != device:
            raise RuntimeError(
                f"Expected a '{device}' device type for generator but found '{found}'"
            )
    if given or device == _CPU:
        return func(*args, **kwargs)
    own, cpu = torch.cuda.default_generators[device.index], torch.default_generator
    before = cpu.get_state()
    cpu.set_state(own.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        own.set_state(cpu.get_state())
        cpu.set_state(before)


def _device_of(generator: Generator) -> torch.device:
    """Returns a generator's device; operations get another object of the same generator."""
    address = attrgetter("_cdata")
    for own in torch.cuda.default_generators:
        if address(own) == address(generator):
            return own.device
    return generator.device


def of_cuda_random(streams) -> list[tuple[object, str, object]]:
    """Returns what ``torch.cuda.random`` has imported by name, as module, name and stand-in."""
    fakes = {
        "_lazy_init": lambda: None,
        "current_device": streams.current_device,
        "device_count": lambda: streams.num_devices,
        "is_initialized": lambda: True,
    }
    return [(torch.cuda.random, name, value) for name, value in fakes.items()]
