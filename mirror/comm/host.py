"""The backend "host": replicas on the CPU, reduced in place in replica order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from mirror.comm.base import HALF_DTYPES, Communicator, in_place
from mirror.comm.choose import register
from mirror.comm.packing import plan_packs
from mirror.devices import is_simulated

_COMBINE_: dict[str, Callable[[list[Tensor], list[Tensor]], None]] = {
    "sum": torch._foreach_add_,
    "min": torch._foreach_minimum_,
    "max": torch._foreach_maximum_,
    "prod": torch._foreach_mul_,
}


@register("host")
class HostCommunicator(Communicator):
    """Torch operations over lists of tensors; every element is reduced in replica order.

    So the result has the bits of "naive", whatever is reduced together.
    """

    @classmethod
    def unavailable_reason(cls, devices: Sequence[torch.device]) -> str | None:
        return None if is_simulated(devices) else "it serves CPU devices only"

    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum", scale: float = 1.0) -> None:
        self.check_tensors(tensors, op, scale)
        with in_place(tensors):
            _reduce([[tensor] for tensor in tensors], op, scale)

    def all_reduce_lists(
        self,
        lists: Sequence[Sequence[Tensor]],
        op: str = "sum",
        scale: float = 1.0,
        bytes_per_pack: int = 25 * 2**20,
    ) -> None:
        """Reduces all the lists at once; nothing is packed, and ``bytes_per_pack`` only checked.

        Packing would copy every byte twice, and saves only what the CPU does not have: launches.
        """
        columns = self.check_lists(lists, op, scale)
        plan_packs((), (), bytes_per_pack)
        if columns[0]:
            with in_place(chain(*columns)):
                _reduce(columns, op, scale)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self.check_tensors(tensors, root=root)
        with in_place(tensors):
            for tensor in tensors:
                tensor.copy_(tensors[root])

    def reduce_scatter(self, tensors: Sequence[Tensor], op: str = "sum") -> None:
        self.check_tensors(tensors, op)
        with in_place(tensors):
            _reduce([[tensor] for tensor in tensors], op)

    def all_gather(self, tensors: Sequence[Tensor]) -> None:
        self.check_tensors(tensors)
        with in_place(tensors):
            chunks = [tensor.view(-1).tensor_split(len(tensors)) for tensor in tensors]
            for mine in chunks:
                for i, chunk in enumerate(mine):
                    chunk.copy_(chunks[i][i])


def _reduce(columns: Sequence[list[Tensor]], op: str, scale: float = 1.0) -> None:
    """Leaves ``scale * op`` over the replicas in all columns; ``columns[i]`` are replica i's.

    Tensors of the first replica accumulate in place; half types in a float32 copy.
    """
    first, *others = columns
    totals = [t.float() if t.dtype in HALF_DTYPES else t for t in first]
    for other in others:
        _COMBINE_[op](totals, other)
    if scale != 1:
        torch._foreach_mul_(totals, scale)
    for column in columns if any(t.dtype in HALF_DTYPES for t in first) else others:
        torch._foreach_copy_(column, totals)
