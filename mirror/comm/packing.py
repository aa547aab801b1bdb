"""Packs: tensors that travel in one message, and the flat buffers in which they travel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

FIRST_PACK_BYTES = 2**20
ALIGNMENT_BYTES = 16  # for kernels that load 16 bytes at once

_MAX_PLANS = 256  # of lists of tensors: those of a few models, each with its buckets

Strides = tuple[tuple[int, ...], ...]
_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")


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


def chunk_ends(size: int, num_chunks: int) -> list[int]:
    """Returns the ends of the chunks into which ``torch.tensor_split`` cuts a flat tensor."""
    small, num_larger = divmod(size, num_chunks)
    return [small * (i + 1) + min(i + 1, num_larger) for i in range(num_chunks)]


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
    is_same = strides.count(strides[0]) == len(strides)
    return is_same and _is_gapless(tensors[0].shape, strides[0])


def _is_gapless(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
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


class _FlatPlan(NamedTuple):
    """A flat buffer: which tensors it holds, and where. It is planned once, and used every step.

    Attributes:
        pick: returns the tensors of this buffer from a list of all; ``positions`` are theirs.
        sizes: the elements of the buffer's parts: the tensors, and gaps up to the next multiple
            of 16 bytes.
        pick_parts: returns the tensors' parts; ``gaps`` are the indices of the others.
        shaped: the indices, among the tensors, of those with a layout unlike that of their part,
            which is flat.
        shapes: of these.
        strides: of these, per replica, or once if all replicas have the same.
    """

    pick: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    positions: tuple[int, ...]
    sizes: list[int]
    pick_parts: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    gaps: list[int]
    shaped: list[int]
    shapes: list[Any]
    strides: list[list[tuple[int, ...]]]


def move_into_flats(
    columns: Sequence[list[Tensor]], bytes_per_pack: int
) -> tuple[list[list[Tensor]], list[int]]:
    """Moves tensors into new flat buffers, one per pack; their lists then hold views of these.

    A view has the strides of its tensor and starts at a multiple of 16 bytes. For autograd it is
    not a view: it has its own version counter, and ``detach_()`` accepts it.

    The number of operations does not depend on the number of tensors, except for one that gives
    its shape to each that is not of one dimension. Every operation lets go of the GIL.

    Args:
        columns: one list of tensors per replica, equal in shape and dtype at each position.

    Returns:
        The buffers of each replica, and the positions of tensors that are not moved: a tensor
        alone in its pack, and one with gaps or with different strides on the replicas.
    """
    first = columns[0]
    strides = [tuple(map(Tensor.stride, column)) for column in columns]
    layouts = strides[:1] if strides.count(strides[0]) == len(strides) else strides
    plans, staying = _plan_flats(
        tuple(map(_shape_of, first)), tuple(map(_dtype_of, first)), tuple(layouts), bytes_per_pack
    )
    buffers: list[list[Tensor]] = [[] for _ in columns]
    for plan in plans:
        for r, (own, column) in enumerate(zip(buffers, columns, strict=True)):
            own.append(_move(column, plan, plan.strides[r % len(layouts)]))
    return buffers, list(staying)


def _move(column: list[Tensor], plan: _FlatPlan, strides: Sequence[tuple[int, ...]]) -> Tensor:
    """Moves the tensors of a plan into a new flat tensor; views replace them."""
    tensors = plan.pick(column)
    buffer = tensors[0].new_empty(sum(plan.sizes))
    # Not views for autograd, unlike those of ``split_with_sizes``.
    parts = torch.unsafe_split_with_sizes(buffer, plan.sizes)
    views = plan.pick_parts(parts)
    shaped = map(Tensor.as_strided_, map(views.__getitem__, plan.shaped), plan.shapes, strides)
    deque(shaped, maxlen=0)
    torch._foreach_copy_(views, tensors)
    if plan.gaps:  # no kernel reads memory that was never written
        torch._foreach_zero_(list(map(parts.__getitem__, plan.gaps)))
    for i, view in zip(plan.positions, views, strict=True):
        column[i] = view
    return buffer


@lru_cache(_MAX_PLANS)
def _plan_flats(
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    layouts: tuple[Strides, ...],
    bytes_per_pack: int,
) -> tuple[tuple[_FlatPlan, ...], tuple[int, ...]]:
    """Plans the flat buffers of tensors; returns also the positions of those that stay.

    Args:
        layouts: the strides of each replica's tensors, or those of one if all have the same.
    """
    staying: list[int] = []
    moving: list[int] = []
    for i, (shape, rows) in enumerate(zip(shapes, zip(*layouts, strict=True), strict=True)):
        (moving if _are_alike(shape, rows) else staying).append(i)
    sizes_bytes = [shapes[i].numel() * dtypes[i].itemsize for i in moving]
    plans: list[_FlatPlan] = []
    for pack in plan_packs(sizes_bytes, [dtypes[i] for i in moving], bytes_per_pack):
        positions = tuple(moving[i] for i in pack)
        if len(positions) == 1:
            staying += positions
        else:
            plans.append(_plan_flat(positions, shapes, dtypes[positions[0]].itemsize, layouts))
    return tuple(plans), tuple(staying)


def _plan_flat(
    positions: tuple[int, ...],
    shapes: Sequence[torch.Size],
    size_bytes: int,
    layouts: Sequence[Strides],
) -> _FlatPlan:
    sizes: list[int] = []
    parts: list[int] = []
    gaps: list[int] = []
    for i in positions:
        num = shapes[i].numel()
        parts.append(len(sizes))
        sizes.append(num)
        gap = -num * size_bytes % ALIGNMENT_BYTES // size_bytes
        if gap:
            gaps.append(len(sizes))
            sizes.append(gap)
    shaped = [
        k
        for k, i in enumerate(positions)
        if len(shapes[i]) != 1 or any(strides[i] != (1,) for strides in layouts)
    ]
    return _FlatPlan(
        itemgetter(*positions),
        positions,
        sizes,
        itemgetter(*parts),
        gaps,
        shaped,
        [shapes[positions[k]] for k in shaped],
        [[strides[positions[k]] for k in shaped] for strides in layouts],
    )


def _are_alike(shape: Sequence[int], rows: Sequence[tuple[int, ...]]) -> bool:
    """Whether tensors of one shape, given by their strides, have no gaps and one memory order."""
    used = [[stride for stride, size in zip(row, shape, strict=True) if size != 1] for row in rows]
    return used.count(used[0]) == len(used) and _is_gapless(shape, rows[0])
