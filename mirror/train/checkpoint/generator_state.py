"""The process's random generators in a checkpoint, and generators that the user has made.

Between runs the global generators are all there is of the replicas' streams: see [Note: Streams
of replicas] in ``mirror/execution/replica_rng.py``. The first replica goes on with the CPU's
generator; the stream of any other follows, in every run, from that one's state and the replica's
number. So with the same number of replicas training goes on bit for bit; with another number the
replicas that were there before draw what they would have drawn, and new ones from streams of their
own. On GPUs every device's generator is saved; of devices that were not there, it stays as it is.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mirror.data.rng_state import capture_rng, restore_rng
from mirror.devices import cuda_devices_in_use, random_state, set_random_state, state_of

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def take_global() -> dict[str, Any]:
    """Returns the states of torch's, Python's and numpy's global generators."""
    cuda = {str(device): random_state(device) for device in cuda_devices_in_use()}
    return {**capture_rng(), "cuda": cuda}


def give_global(state: Mapping[str, Any]) -> None:
    """Puts the global generators to where they stood.

    Raises:
        Exception: of many types; it is no such state, and some generators may have changed.
    """
    restore_rng(state)
    for device in cuda_devices_in_use():
        if str(device) in state["cuda"]:
            set_random_state(device, state["cuda"][str(device)])


def is_generator(obj: object) -> bool:
    """Whether it is a generator of torch's, Python's or numpy's."""
    return isinstance(obj, _KINDS)


def take(generator: Any) -> Any:
    """Returns a generator's state, as plain values and tensors."""
    if isinstance(generator, torch.Generator):
        return state_of(generator)
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def give(generator: Any, state: Any) -> None:
    """Puts a generator to where it stood."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
