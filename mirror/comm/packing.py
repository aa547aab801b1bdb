"""Packs: tensors that travel in one message, and the flat buffers in which they travel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

FIRST_PACK_BYTES = 2**20
ALIGNMENT_BYTES = 16  # for kernels that load 16 bytes at once


def plan_packs(
    sizes_bytes: Sequence[int], dtypes: Sequence[torch.dtype], bytes_per_pack: int
) -> tuple[tuple[int, ...], ...]:
    """Plans which tensors are reduced together; returns the indices in each pack.

    A pack has tensors of one dtype in the given order, and at most ``bytes_per_pack`` bytes. The
    first pack has at most 1 MiB, so that the first transfer starts early. A larger tensor is a
    pack of its own.

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
    """Replaces tensors that are not contiguous by flat views, if no replica needs a copy.

    A weight in channels-last layout has a gradient in that layout. Flattening it in row-major
    order copies it, and copying back takes another launch. So its elements travel in memory order.
    """
    if False not in [tensor.is_contiguous() for tensor in chain(*columns)]:
        return columns
    rows = [
        [tensor.as_strided((tensor.numel(),), (1,)) for tensor in row]
        if have_same_strides(row)
        else row
        for row in zip(*columns, strict=True)
    ]
    return list(zip(*rows, strict=True))


def have_same_strides(tensors: Sequence[Tensor]) -> bool:
    """Returns whether equal positions in memory are equal elements in all tensors."""
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
    """Copies a buffer, as ``flatten(tensors)`` returns it, back into the tensors."""
    parts = buffer.split_with_sizes([tensor.numel() for tensor in tensors])
    views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), views)


def move_into_flats(
    columns: Sequence[list[Tensor]], bytes_per_pack: int
) -> tuple[list[list[Tensor]], list[int]]:
    """Moves tensors into flat buffers, one per pack, and replaces them by views in their lists.

    A view has the strides of its tensor and starts at a multiple of 16 bytes. For autograd it is
    not a view: it has its own version counter, and ``detach_()`` accepts it.

    Args:
        columns: one list of tensors per replica, equal in shape and dtype at each position.

    Returns:
        The buffers of each replica, and the positions of tensors that are not moved: a tensor
        alone in its pack, and one with gaps or with different strides on the replicas.
    """
    contiguous = in_memory_order(columns)
    first = columns[0]
    staying: list[int] = []
    if contiguous is not columns:
        rows = zip(*contiguous, strict=True)
        staying = [i for i, row in enumerate(rows) if not all(t.is_contiguous() for t in row)]
    moving = [i for i in range(len(first)) if i not in staying]
    sizes, dtypes = [first[i].nbytes for i in moving], [first[i].dtype for i in moving]
    buffers: list[list[Tensor]] = [[] for _ in columns]
    for pack in plan_packs(sizes, dtypes, bytes_per_pack):
        positions = [moving[i] for i in pack]
        if len(positions) == 1:
            staying += positions
            continue
        for own, column, parts in zip(buffers, columns, contiguous, strict=True):
            buffer, views = _move([column[i] for i in positions], [parts[i] for i in positions])
            own.append(buffer)
            for i, view in zip(positions, views, strict=True):
                column[i] = view
    return buffers, staying


def _move(tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns a new flat tensor, and views of it that replace the tensors.

    Args:
        parts: the tensors, in memory order and contiguous.
    """
    pieces = [part.view(-1) for part in parts]
    sizes = [part.numel() for part in parts]
    size, step = parts[0].element_size(), 1
    gaps = [-num * size % ALIGNMENT_BYTES // size for num in sizes]
    if any(gaps):
        zeros, step = parts[0].new_zeros(ALIGNMENT_BYTES), 2
        fillers = {gap: zeros[:gap] for gap in set(gaps)}
        pieces = [*chain(*zip(pieces, [fillers[gap] for gap in gaps], strict=True))]
        sizes = [*chain(*zip(sizes, gaps, strict=True))]
    buffer = torch.cat(pieces)
    views = torch.unsafe_split_with_sizes(buffer, sizes)[::step]
    return buffer, [
        view.as_strided_(tensor.shape, tensor.stride())
        for view, tensor in zip(views, tensors, strict=True)
    ]
