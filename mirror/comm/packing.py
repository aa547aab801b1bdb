"""Packs: which of many tensors travel together, and the contiguous buffers they travel in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

FIRST_PACK_BYTES = 2**20


def plan_packs(
    sizes_bytes: Sequence[int], dtypes: Sequence[torch.dtype], bytes_per_pack: int
) -> tuple[tuple[int, ...], ...]:
    """Plans which tensors are reduced together; returns the indices in each pack.

    A pack holds tensors of one dtype in the given order, at most ``bytes_per_pack`` of them, and
    the very first at most 1 MiB: it is what the network waits for first. A tensor that is larger
    than that is a pack of its own.

        sizes 4 4 8 4, dtypes f f i f, 8 bytes per pack  ->  (0, 1) (3) (2)

    Args:
        sizes_bytes, dtypes: of the tensors of one replica.
        bytes_per_pack: 0 makes every tensor a pack of its own.
    """
    if bytes_per_pack == 0:
        return tuple((i,) for i in range(len(sizes_bytes)))
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        by_dtype.setdefault(dtype, []).append(i)
    packs: list[tuple[int, ...]] = []
    for indices in by_dtype.values():
        pack: list[int] = []
        pack_bytes = 0
        for i in indices:
            limit = bytes_per_pack if packs else min(bytes_per_pack, FIRST_PACK_BYTES)
            if pack and pack_bytes + sizes_bytes[i] > limit:
                packs.append(tuple(pack))
                pack, pack_bytes = [], 0
            pack.append(i)
            pack_bytes += sizes_bytes[i]
        packs.append(tuple(pack))
    return tuple(packs)


def in_memory_order(columns: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    """Returns flat views of tensors that are not contiguous, where no replica needs a copy.

    A weight in channels-last layout has a gradient like it: to flatten that row by row copies it,
    and to copy it back takes a launch of its own. Its elements may as well travel as they lie.
    """
    if False not in [tensor.is_contiguous() for tensor in chain(*columns)]:
        return columns
    rows = [
        [tensor.as_strided((tensor.numel(),), (1,)) for tensor in row] if lie_alike(row) else row
        for row in zip(*columns, strict=True)
    ]
    return list(zip(*rows, strict=True))


def lie_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether element by element in memory is element by element of the tensors."""
    if False not in [tensor.is_contiguous() for tensor in tensors]:
        return True
    first = tensors[0]
    strides = first.stride()
    return all(tensor.stride() == strides for tensor in tensors) and _is_gapless(first)


def _is_gapless(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flatten(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Returns a new flat tensor with the elements of all the tensors, in row-major order.

    Args:
        dtype: of the result, cast in the same pass; the tensors' own if ``None``.
    """
    parts = [tensor.reshape(-1) for tensor in tensors]
    if dtype is None:
        return torch.cat(parts)
    num_elements = sum(part.numel() for part in parts)
    return torch.cat(parts, out=torch.empty(num_elements, dtype=dtype, device=parts[0].device))


def copy_back(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies the elements of ``flatten(tensors)`` back into the tensors."""
    parts = buffer.split_with_sizes([tensor.numel() for tensor in tensors])
    views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), views)
