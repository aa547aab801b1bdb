"""What the collectives demand of their arguments: dtypes, and tensors that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

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


def refuse_tensors(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> NoReturn:
    """Raises what is wrong with tensors that are not alike and contiguous."""
    if are_alike(tensors, devices):
        replica_id, tensor = next(
            (i, tensor) for i, tensor in enumerate(tensors) if not tensor.is_contiguous()
        )
        raise ShapeError(
            f"a collective needs contiguous tensors; {_place(replica_id)} has shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}; call .contiguous() on "
            "it first, or use all_reduce_lists, which takes any strides"
        )
    refuse_unlike(tensors, devices)


def refuse_unlike(
    tensors: Sequence[Tensor], devices: Sequence[torch.device], index: int | None = None
) -> NoReturn:
    """Raises what is wrong with tensors that are not alike, at ``index`` of their lists."""
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


def refuse_shared_memory() -> NoReturn:
    """Says that two tensors of ``all_reduce_lists`` share memory."""
    raise ShapeError(
        "no two tensors of a collective may share memory; two of these do; pass a clone of one "
        "of them"
    )


def are_alike(tensors: Sequence[object], devices: Sequence[torch.device]) -> bool:
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
    """Whether no two elements are one by a stride of 0."""
    return all(s != 0 or n <= 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
