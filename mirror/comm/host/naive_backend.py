"""The backend "naive": slow and plain, on any devices; the reference for all other backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mirror.comm.communicator import HALF_DTYPES, Communicator, writing_in_place
from mirror.comm.registry import register


@register("naive")
class NaiveCommunicator(Communicator):
    """Reduces on the first device, in replica order, and copies the result to all."""

    deterministic = True
    concurrent = True

    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum", scale: float = 1.0) -> None:
        self.check_tensors(tensors, op, scale)
        with writing_in_place(tensors):
            result = reduce_in_order(tensors, op, scale)
            for tensor in tensors:
                tensor.copy_(result)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self.check_tensors(tensors, root=root)
        with writing_in_place(tensors):
            for tensor in tensors:
                tensor.copy_(tensors[root])

    def reduce_scatter(self, tensors: Sequence[Tensor], op: str = "sum") -> None:
        self.check_tensors(tensors, op)
        with writing_in_place(tensors):
            for i, chunks in enumerate(_chunks(tensors)):
                chunks[i].copy_(reduce_in_order(chunks, op))

    def all_gather(self, tensors: Sequence[Tensor]) -> None:
        self.check_tensors(tensors)
        with writing_in_place(tensors):
            for i, chunks in enumerate(_chunks(tensors)):
                for chunk in chunks:
                    chunk.copy_(chunks[i])


def _chunks(tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Returns, for each chunk, its views in all tensors."""
    return list(zip(*(t.view(-1).tensor_split(len(tensors)) for t in tensors), strict=True))


_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
}


def reduce_in_order(tensors: Sequence[Tensor], op: str, scale: float = 1.0) -> Tensor:
    """Returns ``scale * op(tensors)`` on the first tensor's device, reduced in replica order.

    Half types are accumulated in float32, and rounded once.
    """
    first = tensors[0]
    dtype = torch.float32 if first.dtype in HALF_DTYPES else first.dtype
    total = first.to(dtype)
    for tensor in tensors[1:]:
        total = _COMBINE[op](total, tensor.to(first.device, dtype))
    return (total if scale == 1 else total * float(scale)).to(first.dtype)
