"""The operations that mirror adds to a trace: collectives, updates, random draws, the fused LSTM.

A draw is a function of a seed and a position, in torch's integer arithmetic. It needs no generator
and nothing from the host. So a GPU draws inside a CUDA graph, where the seed is memory, and all
devices draw the same bits (normal numbers may differ in the last bit of a logarithm or a cosine).
The function is SplitMix64: a count in steps of the golden ratio, scrambled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mirror.compiler import fused_lstm

# Their names in a graph.
COLLECTIVE, UPDATE, DRAW = (f"mirror.{name}.default" for name in ("collective", "update", "draw"))

# SplitMix64's, as int64 has them.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


@functools.cache
def define_ops() -> None:
    """Defines ``torch.ops.mirror``; once."""
    library = torch.library.Library("mirror", "FRAGMENT")
    library.define("collective(Tensor[] tensors, int number) -> Tensor[]")
    library.impl("collective", _collective, "CompositeExplicitAutograd")
    library.impl("collective", _make_fakes, "Meta")
    library.define("update(Tensor[] tensors, int number) -> Tensor[]")
    library.impl("update", _update, "CompositeExplicitAutograd")
    library.impl("update", _make_updated_fakes, "Meta")
    library.define("draw(SymInt[] size, Tensor seed, int number, str mode) -> Tensor")
    library.impl("draw", _draw, "CompositeExplicitAutograd")
    library.impl("draw", _make_fake_draw, "Meta")
    fused_lstm.define_lstm(library)
    _kept.append(library)


_kept: list[torch.library.Library] = []


def _collective(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    """Marks a collective point. The graph is cut there, so programs never call it."""
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


def _make_fakes(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _update(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    """Marks the step of an optimizer between two programs; they never call it either."""
    return [tensor.clone() for tensor in tensors]


def _make_updated_fakes(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _draw(size: Sequence[int], seed: Tensor, number: int, mode: str) -> Tensor:
    """Returns float32 numbers in [0, 1), or normal ones: the draw of this number in a step.

    The numbers depend on the seed, ``number`` and the position only; see the head of this file.
    """
    # Not with device=: torch cannot create tensors on a device that a test simulates.
    count = torch.arange(math.prod(size), out=seed.new_empty(math.prod(size)))
    key = _mix_bits(_mix_bits(seed + _GOLDEN) + number)
    bits = _mix_bits(count * _GOLDEN + key)
    if mode == "rand":
        return _shift_right(bits, 40).to(torch.float32).mul_(2.0**-24).view(size)
    # Box and Muller; the first in (0, 1], for its logarithm.
    first = _shift_right(bits, 32).add_(1).to(torch.float32).mul_(2.0**-32)
    angle = (bits & 0xFFFFFFFF).to(torch.float32).mul_(2.0**-32 * math.tau)
    return first.log_().mul_(-2.0).sqrt_().mul_(angle.cos_()).view(size)


def _mix_bits(values: Tensor) -> Tensor:
    """Returns int64 values of which every bit depends on every bit of those given."""
    values = (values ^ _shift_right(values, 30)) * _FIRST
    values = (values ^ _shift_right(values, 27)) * _SECOND
    return values ^ _shift_right(values, 31)


def _shift_right(values: Tensor, by: int) -> Tensor:
    """Returns int64 values shifted to the right, with zeros from the left."""
    return (values >> by) & ((1 << (64 - by)) - 1)


def _make_fake_draw(size: Sequence[int], seed: Tensor, number: int, mode: str) -> Tensor:
    return torch.empty(size, device=seed.device, dtype=torch.float32)
