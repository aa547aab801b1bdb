"""Operations that a trace is made of besides torch's: where replicas meet, and random numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


@functools.cache
def define() -> None:
    """Defines ``torch.ops.mirror``; once."""
    library = torch.library.Library("mirror", "FRAGMENT")
    library.define("meet(Tensor[] tensors, int number) -> Tensor[]")
    library.impl("meet", _meet, "CompositeExplicitAutograd")
    library.impl("meet", _like, "Meta")
    library.define("draw(SymInt[] size, Tensor seed, int number, str mode) -> Tensor")
    library.impl("draw", _draw, "CompositeExplicitAutograd")
    library.impl("draw", _drawn, "Meta")
    _kept.append(library)


_kept: list[torch.library.Library] = []


def _meet(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    """Stands where the replicas meet; a program is cut there, and never runs it."""
    return [tensor.clone() for tensor in tensors]


def _like(tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _draw(size: Sequence[int], seed: Tensor, number: int, mode: str) -> Tensor:
    """Returns float32 numbers in [0, 1), or normal ones: the draw of this number in a step."""
    generator = torch.Generator(seed.device)
    generator.manual_seed(int(seed) + number)
    draw = torch.rand if mode == "rand" else torch.randn
    return draw(size, generator=generator, device=seed.device, dtype=torch.float32)


def _drawn(size: Sequence[int], seed: Tensor, number: int, mode: str) -> Tensor:
    return torch.empty(size, device=seed.device, dtype=torch.float32)
