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
        return tuple(zip(range(len(sizes_bytes)), strict=True))
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


def view_in_memory_order(columns: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    """Replaces tensors that are not contiguous by flat views, if no replica needs a copy.

    A weight in channels-last layout has a gradient in that layout. Flattening it in row-major
    order copies it, and copying back takes another launch. So its elements travel in memory order.
    """
    if all(map(Tensor.is_contiguous, chain(*columns))):
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
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    strides = list(map(Tensor.stride, tensors))
    return strides.count(strides[0]) == len(strides) and _is_gapless(tensors[0])


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
    contiguous = view_in_memory_order(columns)
    first = columns[0]
    staying: list[int] = []
    moving: list[int] = []
    sizes: list[int] = []
    dtypes: list[torch.dtype] = []
    for i, row in enumerate(zip(*contiguous, strict=True)):
        if contiguous is columns or all(map(Tensor.is_contiguous, row)):
            moving.append(i)
            sizes.append(first[i].nbytes)
            dtypes.append(first[i].dtype)
        else:
            staying.append(i)
    buffers: list[list[Tensor]] = [[] for _ in columns]
    for pack in plan_packs(sizes, dtypes, bytes_per_pack):
        positions = list(map(moving.__getitem__, pack))
        if len(positions) == 1:
            staying += positions
            continue
        for own, column, parts in zip(buffers, columns, contiguous, strict=True):
            own.append(_move(column, parts, positions))
    return buffers, staying


def _move(column: list[Tensor], parts: Sequence[Tensor], positions: Sequence[int]) -> Tensor:
    """Moves the tensors at these positions into a new flat tensor; views replace them.

    Args:
        parts: the column's tensors, in memory order and contiguous.
    """
    like = parts[positions[0]]
    zeros: Tensor | None = None  # fills the gap before the next multiple of 16 bytes
    size_bytes = like.element_size()
    pieces: list[Tensor] = []
    sizes: list[int] = []
    for i in positions:
        piece = parts[i].view(-1)
        num = piece.numel()
        gap = -num * size_bytes % ALIGNMENT_BYTES // size_bytes
        if zeros is None and gap:
            zeros = like.new_zeros(ALIGNMENT_BYTES)
        pieces.append(piece)
        sizes += num, gap
        if zeros is not None and gap:
            pieces.append(zeros[:gap])
    buffer = torch.cat(pieces)
    views = torch.unsafe_split_with_sizes(buffer, sizes)[::2]
    for i, view in zip(positions, views, strict=True):
        column[i] = view.as_strided_(column[i].shape, column[i].stride())
    return buffer
