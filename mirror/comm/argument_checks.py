"""Checks of the collectives' arguments: dtypes, and equal shapes on all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import sub
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
WIDE_DTYPES = frozenset({torch.float32, torch.float64})  # may be sent in another dtype


def raise_for_tensors(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> NoReturn:
    """Raises the error for tensors that are not contiguous, or do not match."""
    if have_same_layout(tensors, devices):
        replica_id, tensor = next(
            (i, tensor) for i, tensor in enumerate(tensors) if not tensor.is_contiguous()
        )
        raise ShapeError(
            f"a collective needs contiguous tensors; {_name(replica_id)} has shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}; call .contiguous() on "
            "it first, or use all_reduce_lists, which takes any strides"
        )
    raise_for_mismatch(tensors, devices)


def raise_for_mismatch(
    tensors: Sequence[Tensor], devices: Sequence[torch.device], index: int | None = None
) -> NoReturn:
    """Raises the error for tensors, at ``index`` of their lists, that do not match."""
    first = tensors[0]
    for replica_id, tensor in enumerate(tensors):
        _check_tensor(tensor, devices[replica_id], replica_id, index)
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ShapeError(
                "a collective needs tensors of equal shape and dtype on all replicas; "
                f"{_name(replica_id, index)} has {tuple(tensor.shape)} {tensor.dtype}, that "
                f"of replica 0 {tuple(first.shape)} {first.dtype}; make them equal on every "
                "replica first"
            )
    raise TypeError(
        "a collective needs tensors whose memory holds their values; one of "
        f"{_name(0, index)} and its like is negated lazily; call .resolve_neg() on it first"
    )


def _check_tensor(
    tensor: Tensor, device: torch.device, replica_id: int, index: int | None = None
) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(
            f"a collective needs dense tensors; {_name(replica_id, index)} is of kind "
            f"{kind}; pass its values as a dense tensor"
        )
    if tensor.device != device:
        raise DeviceError(
            f"the tensors of replica i must be on device i; {_name(replica_id, index)} is "
            f"on '{tensor.device}' instead of '{device}'; move it there"
        )


def _name(replica_id: int, index: int | None = None) -> str:
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
    begins = sorted(map(Tensor.data_ptr, tensors))
    if num_bytes <= min(map(sub, begins[1:], begins), default=num_bytes):
        return
    owners = sorted((tensor.data_ptr(), i) for i, tensor in enumerate(tensors))
    for (begin, one), (end, other) in pairwise(owners):
        if end - begin < num_bytes:
            raise ShapeError(
                "no two tensors of a collective may share memory; those of replicas "
                f"{min(one, other)} and {max(one, other)} do; pass a clone of one of them"
            )


def have_same_layout(tensors: Sequence[object], devices: Sequence[torch.device]) -> bool:
    """Returns whether all are dense tensors of one shape and dtype, each on its device.

    This runs for every tensor of every collective and takes some 0.4 us for each. So it does not
    find out what is wrong; ``raise_for_mismatch`` does that.
    """
    first = tensors[0]
    if not isinstance(first, Tensor):
        return False
    shape, dtype = first.shape, first.dtype
    # A conjugate's imaginary part is contiguous only if it is a single element.
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
    return all(map(Tensor.is_contiguous, tensors))


def has_own_elements(tensor: Tensor) -> bool:
    """Returns whether no two elements of a tensor share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride == 0:
                return tensor.numel() == 0
            if stride <= reach:
                return not _elements_overlap([tensor])
            reach += stride * (size - 1)
    return True


def share_memory(tensors: Iterable[Tensor]) -> bool:
    """Returns whether two of the tensors share memory; gaps between elements do not count."""
    nonempty = [tensor for tensor in tensors if tensor.nbytes]
    if are_contiguous(nonempty):
        spans = sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in nonempty])
        return any(begin + size > after for (begin, size), (after, _) in pairwise(spans))
    extents = sorted((t.data_ptr(), _extent_bytes(t), i) for i, t in enumerate(nonempty))
    near: list[Tensor] = []
    end = 0
    for begin, num_bytes, i in extents:
        if begin >= end:
            if len(near) > 1 and _elements_overlap(near):
                return True
            near = []
        near.append(nonempty[i])
        end = max(end, begin + num_bytes)
    return len(near) > 1 and _elements_overlap(near)


def _extent_bytes(tensor: Tensor) -> int:
    """Returns the number of bytes from the start of a tensor's first element to its end."""
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor.element_size() * (1 + sum(stride * (size - 1) for stride, size in steps))


def _elements_overlap(tensors: Sequence[Tensor]) -> bool:
    """Returns whether two elements share memory, by comparing all addresses."""
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
