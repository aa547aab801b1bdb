"""The backend "host": replicas on the CPU, reduced in place in replica order by C++ threads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mirror.comm.communicator import Communicator, in_place
from mirror.comm.host.host_library import missing_reason, require
from mirror.comm.packing import have_same_strides
from mirror.comm.registry import register
from mirror.devices import is_simulated, parse


@register("host")
class HostCommunicator(Communicator):
    """Reads all replicas' buffers once, reduces them in registers, and writes the result once.

    Every element is reduced in replica order, so results have the bits of "naive" and do not
    depend on which tensors are reduced together. It uses ``torch.get_num_threads()`` threads.
    """

    deterministic = True
    concurrent = True
    packs = False

    def __init__(self, devices: Sequence[torch.device | str]) -> None:
        """Serves one replica per entry of ``devices``.

        Raises:
            DeviceError: a device does not exist.
            BackendError: the C++ library is not built.
        """
        super().__init__(devices)
        self._library = require()

    @classmethod
    def unavailable_reason(cls, devices: Sequence[torch.device | str]) -> str | None:
        return missing_reason() if is_simulated(parse(devices)) else "it serves CPU devices only"

    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum", scale: float = 1.0) -> None:
        self.check_tensors(tensors, op, scale)
        first = tensors[0]
        self._library.all_reduce(
            _addresses(tensors), (first.numel(),), first.dtype, op, float(scale)
        )
        increment_version(tensors)

    def all_reduce_checked(
        self,
        columns: Sequence[Sequence[Tensor]],
        op: str,
        scale: float,
        bytes_per_pack: int,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        """Reduces all lists in one call, and packs only for another ``wire_dtype``.

        Packing would copy every byte twice to save launches, which the CPU does not have. Tensors
        without gaps, and with equal strides on all replicas, are reduced in place; other tensors
        are reduced in contiguous copies.
        """
        if wire_dtype is not None:
            super().all_reduce_checked(columns, op, scale, bytes_per_pack, wire_dtype)
            return
        copied: dict[int, list[Tensor]] = {}
        if False in [tensor.is_contiguous() for tensor in chain(*columns)]:
            rows = list(zip(*columns, strict=True))
            copied = {i: _copies(row) for i, row in enumerate(rows) if not have_same_strides(row)}
            for i, copies in copied.items():
                rows[i] = tuple(copies)
            reduced: Sequence[Sequence[Tensor]] = list(zip(*rows, strict=True))
        else:
            reduced = columns
        dtypes = {tensor.dtype for tensor in reduced[0]}
        for dtype in dtypes:
            same_dtype = reduced
            if len(dtypes) > 1:
                same_dtype = [[tensor for tensor in c if tensor.dtype is dtype] for c in reduced]
            self._library.all_reduce(
                [tensor.data_ptr() for row in zip(*same_dtype, strict=True) for tensor in row],
                [tensor.numel() for tensor in same_dtype[0]],
                dtype,
                op,
                float(scale),
            )
        if copied:
            with in_place([column[i] for column in columns for i in copied]):
                for i, copies in copied.items():
                    for column, copy in zip(columns, copies, strict=True):
                        column[i].copy_(copy)
        increment_version(chain(*columns))

    def _share_memory(self, columns: Sequence[Sequence[Tensor]]) -> bool:
        rows = list(zip(*columns, strict=True))
        if not all(map(have_same_strides, rows)):
            return super()._share_memory(columns)
        sizes_bytes = [row[0].nbytes for row in rows]
        return bool(rows) and self._library.overlap(_addresses(list(chain(*rows))), sizes_bytes)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self.check_tensors(tensors, root=root)
        first = tensors[0]
        self._library.broadcast(_addresses(tensors), first.numel(), first.dtype, root)
        increment_version(tensors)

    def reduce_scatter(self, tensors: Sequence[Tensor], op: str = "sum") -> None:
        self.check_tensors(tensors, op)
        first = tensors[0]
        self._library.reduce_scatter(_addresses(tensors), first.numel(), first.dtype, op)
        increment_version(tensors)

    def all_gather(self, tensors: Sequence[Tensor]) -> None:
        self.check_tensors(tensors)
        first = tensors[0]
        self._library.all_gather(_addresses(tensors), first.numel(), first.dtype)
        increment_version(tensors)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
