"""Checks of the collectives' arguments: dtypes, and equal shapes on all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from mirror.errors import DeviceError, ShapeError

OPS = ("sum", "min", "max", "prod")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
WIDE_DTYPES = frozenset({torch.float32, torch.float64})  # what may travel in another dtype


def raise_for_tensors(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> NoReturn:
    """Raises an error unless the tensors are equal in shape and dtype, and contiguous."""
    if have_same_layout(tensors, devices):
        replica_id, tensor = next(
            (i, tensor) for i, tensor in enumerate(tensors) if not tensor.is_contiguous()
        )
        raise ShapeError(
            f"a collective needs contiguous tensors; {_place(replica_id)} has shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}; call .contiguous() on "
            "it first, or use all_reduce_lists, which takes any strides"
        )
    raise_for_mismatch(tensors, devices)


def raise_for_mismatch(
    tensors: Sequence[Tensor], devices: Sequence[torch.device], index: int | None = None
) -> NoReturn:
    """Raises an error unless the tensors at ``index`` of their lists match in shape and dtype."""
    first = tensors[0]
    for replica_id, tensor in enumerate(tensors):
        _check_place(tensor, devices[replica_id], replica_id, index)
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ShapeError(
                "a collective needs tensors of equal shape and dtype on all replicas; "
                f"{_place(replica_id, index)} has {tuple(tensor.shape)} {tensor.dtype}, that "
                f"of replica 0 {tuple(first.shape)} {first.dtype}; make them alike on every "
                "replica first"
            )
    raise TypeError(
        "a collective needs tensors whose memory holds their values; one of "
        f"{_place(0, index)} and its like is negated lazily; call .resolve_neg() on it first"
    )


def _check_place(
    tensor: Tensor, device: torch.device, replica_id: int, index: int | None = None
) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(
            f"a collective needs dense tensors; {_place(replica_id, index)} is of kind "
            f"{kind}; pass its values as a dense tensor"
        )
    if tensor.device != device:
        raise DeviceError(
            f"the tensors of replica i must be on device i; {_place(replica_id, index)} is "
            f"on '{tensor.device}' instead of '{device}'; move it there"
        )


def _place(replica_id: int, index: int | None = None) -> str:
    return f"the tensor of replica {replica_id}" + ("" if index is None else f" at {index}")


def check_dtype(tensor: Tensor, scale: float) -> None:
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(
            f"a collective takes the dtypes {names}; got {tensor.dtype}; convert it, bool to "
            "uint8 for instance"
        )
    if scale != 1 and not tensor.is_floating_point():
        raise TypeError(
            f"scale is for floating dtypes only; got scale={scale} with {tensor.dtype}; reduce "
            "without a scale, and divide afterwards"
        )


def check_disjoint(tensors: Sequence[Tensor]) -> None:
    num_bytes = tensors[0].nbytes
    begins = sorted([tensor.data_ptr() for tensor in tensors])
    if all(end - begin >= num_bytes for begin, end in pairwise(begins)):
        return
    owners = sorted((tensor.data_ptr(), i) for i, tensor in enumerate(tensors))
    for (begin, one), (end, other) in pairwise(owners):
        if end - begin < num_bytes:
            raise ShapeError(
                "no two tensors of a collective may share memory; those of replicas "
                f"{min(one, other)} and {max(one, other)} do; pass a clone of one of them"
            )


def have_same_layout(tensors: Sequence[object], devices: Sequence[torch.device]) -> bool:
    """Whether all are dense tensors of one shape and dtype, each in its place.

    This runs for every tensor of every collective, so it only says yes or no: some 0.4 us for
    each. What is wrong is looked for when something is.
    """
    first = tensors[0]
    if not isinstance(first, Tensor):
        return False
    shape, dtype = first.shape, first.dtype
    # Of a conjugate's imaginary part, only a single element can be contiguous.
    may_be_negated = shape.numel() == 1
    for tensor, device in zip(tensors, devices, strict=True):
        if (
            not isinstance(tensor, Tensor)
            or tensor.dtype is not dtype
            or tensor.shape != shape
            or tensor.layout is not torch.strided
            or tensor.device != device
            or (may_be_negated and tensor.is_neg())
        ):
            return False
    return True


def are_contiguous(tensors: Sequence[Tensor]) -> bool:
    return False not in [tensor.is_contiguous() for tensor in tensors]


def has_own_elements(tensor: Tensor) -> bool:
    """Whether no two elements of a tensor share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride == 0:
                return tensor.numel() == 0
            if stride <= reach:
                return not _elements_meet([tensor])
            reach += stride * (size - 1)
    return True


def share_memory(tensors: Iterable[Tensor]) -> bool:
    """Whether two of the tensors share memory; those with gaps may lie in each other's gaps."""
    found = [tensor for tensor in tensors if tensor.nbytes]
    if are_contiguous(found):
        spans = sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in found])
        return any(begin + size > after for (begin, size), (after, _) in pairwise(spans))
    extents = sorted((t.data_ptr(), _extent_bytes(t), i) for i, t in enumerate(found))
    near: list[Tensor] = []
    end = 0
    for begin, num_bytes, i in extents:
        if begin >= end:
            if len(near) > 1 and _elements_meet(near):
                return True
            near = []
        near.append(found[i])
        end = max(end, begin + num_bytes)
    return len(near) > 1 and _elements_meet(near)


def _extent_bytes(tensor: Tensor) -> int:
    """Returns how many bytes lie from a tensor's first to behind its last."""
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor.element_size() * (1 + sum(stride * (size - 1) for stride, size in steps))


def _elements_meet(tensors: Sequence[Tensor]) -> bool:
    """Whether two elements share memory: looks at every one."""
    begins, ends = [], []
    for tensor in tensors:
        offsets = np.zeros((1,), np.int64)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
            offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
        begins.append(tensor.data_ptr() + offsets * tensor.element_size())
        ends.append(begins[-1] + tensor.element_size())
    begin, end = np.concatenate(begins), np.concatenate(ends)
    order = np.argsort(begin)
    return bool(np.any(end[order][:-1] > begin[order][1:]))
