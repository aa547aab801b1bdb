"""The backends without kernels: "host", in C++ for CPU devices, and "naive", for any devices.

"host" is the library of csrc/host/reduce.cpp; it is loaded when first needed. "naive" is slow and
plain, and the reference for all other backends.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mirror.comm.communicator import HALF_DTYPES, Communicator, writing_in_place
from mirror.comm.packing import have_same_strides
from mirror.comm.reduce_ops import PAIRWISE
from mirror.comm.registry import register, unusable_reason
from mirror.devices import is_simulated, parse
from mirror.errors import BackendError


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


def reduce_in_order(tensors: Sequence[Tensor], op: str, scale: float = 1.0) -> Tensor:
    """Returns ``scale * op(tensors)`` on the first tensor's device, reduced in replica order.

    Half types are accumulated in float32, and rounded once.
    """
    first = tensors[0]
    dtype = torch.float32 if first.dtype in HALF_DTYPES else first.dtype
    total = first.to(dtype)
    for tensor in tensors[1:]:
        total = PAIRWISE[op](total, tensor.to(first.device, dtype))
    return (total if scale == 1 else total * float(scale)).to(first.dtype)


PATH = Path(__file__).with_name("_reduce.so")


# Numbered as in csrc/host/reduce.cpp.
_OPS = {"sum": 0, "min": 1, "max": 2, "prod": 3}

_DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.uint8: 6,
}

_I, _L, _P = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p


# Arrays are passed as the bytes of an ``array``, in a quarter of the time of a ctypes array.
_ARRAY = ctypes.c_char_p

_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "mirror_all_reduce": (None, [_ARRAY, _ARRAY, _L, _I, _I, _I, ctypes.c_double, _I]),
    "mirror_pack_sums": (
        None,
        [_ARRAY, _ARRAY, _ARRAY, _L, _I, _I, ctypes.c_double, _ARRAY, _L, _P, _I],
    ),
    "mirror_reduce_scatter": (None, [_ARRAY, _L, _I, _I, _I, _I]),
    "mirror_all_gather": (None, [_ARRAY, _L, _I, _I, _I]),
    "mirror_broadcast": (None, [_ARRAY, _L, _I, _I, _I, _I]),
    "mirror_stream_copy": (None, [_P, _P, _L, _I, _I]),
    "mirror_overlap": (_I, [_ARRAY, _ARRAY, _L, _I]),
    "mirror_set_level": (_I, [_I]),
    "mirror_level": (_I, []),
    "mirror_level_name": (ctypes.c_char_p, [_I]),
}


class BufferAddresses:
    """The positions of tensors of one dtype in a flat buffer, encoded for the library.

    Args:
        counts: the number of elements of each tensor.
        offsets: the first element of each tensor in the buffer, and the end of the last one.

    Raises:
        KeyError: the library does not sum that dtype.
    """

    __slots__ = ("counts", "dtype", "num_tensors", "offsets")

    def __init__(self, counts: Sequence[int], offsets: Sequence[int], dtype: torch.dtype) -> None:
        self.dtype, self.num_tensors = _DTYPES[dtype], len(counts)
        self.counts = _pack(counts)
        self.offsets = _pack([offset * dtype.itemsize for offset in offsets])


class HostLibrary:
    """The functions of the library, with addresses and counts as Python sequences of ints.

    ``addresses`` has one address per replica for each tensor, tensor after tensor. Arguments are
    not checked. Calls release the GIL, and use ``torch.get_num_threads()`` threads.
    """

    def __init__(self, path: Path) -> None:
        """Loads the library.

        Raises:
            OSError: the file does not exist or does not load.
            AttributeError: a function is missing, as in a build of another version of csrc/.
        """
        self._c = ctypes.CDLL(str(path))
        for name, (restype, argtypes) in _SIGNATURES.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = restype, argtypes

    def all_reduce(
        self,
        addresses: Sequence[int],
        counts: Sequence[int],
        dtype: torch.dtype,
        op: str,
        scale: float,
    ) -> None:
        self._c.mirror_all_reduce(
            _pack(addresses),
            _pack(counts),
            len(counts),
            len(addresses) // len(counts),
            _DTYPES[dtype],
            _OPS[op],
            scale,
            torch.get_num_threads(),
        )

    def pack_sums(
        self,
        addresses: Sequence[int],
        positions: BufferAddresses,
        scale: float,
        tail: bytes,
        target: int,
    ) -> None:
        """Writes the replicas' sums, multiplied by ``scale``, into a flat buffer.

        Args:
            tail: bytes to write after the sums.
            target: the address of the buffer.
        """
        self._c.mirror_pack_sums(
            _pack(addresses),
            positions.counts,
            positions.offsets,
            positions.num_tensors,
            len(addresses) // positions.num_tensors,
            positions.dtype,
            scale,
            tail,
            len(tail),
            target,
            torch.get_num_threads(),
        )

    def reduce_scatter(
        self, addresses: Sequence[int], count: int, dtype: torch.dtype, op: str
    ) -> None:
        self._c.mirror_reduce_scatter(
            _pack(addresses),
            count,
            len(addresses),
            _DTYPES[dtype],
            _OPS[op],
            torch.get_num_threads(),
        )

    def all_gather(self, addresses: Sequence[int], count: int, dtype: torch.dtype) -> None:
        self._c.mirror_all_gather(
            _pack(addresses), count, len(addresses), _DTYPES[dtype], torch.get_num_threads()
        )

    def broadcast(
        self, addresses: Sequence[int], count: int, dtype: torch.dtype, root: int
    ) -> None:
        self._c.mirror_broadcast(
            _pack(addresses), count, len(addresses), _DTYPES[dtype], root, torch.get_num_threads()
        )

    def overlap(self, addresses: Sequence[int], sizes_bytes: Sequence[int]) -> bool:
        """Returns whether two of the tensors share memory."""
        num_replicas = len(addresses) // len(sizes_bytes)
        result = self._c.mirror_overlap(
            _pack(addresses), _pack(sizes_bytes), len(sizes_bytes), num_replicas
        )
        return bool(result)

    def stream_copy(self, target: int, source: int, num_bytes: int, *, past_caches: bool) -> None:
        """Copies memory, as a baseline of benchmarks; size and addresses are multiples of 16."""
        self._c.mirror_stream_copy(target, source, num_bytes, past_caches, torch.get_num_threads())

    def levels(self) -> tuple[str, ...]:
        """Returns the instruction sets that this machine supports, slowest first."""
        current = self._c.mirror_level()
        names: list[str] = []
        while self._c.mirror_set_level(len(names)) == 0:
            names.append(self.level())
        self._c.mirror_set_level(current)
        return tuple(names)

    def level(self) -> str:
        """Returns the instruction set in use."""
        name: bytes = self._c.mirror_level_name(self._c.mirror_level())
        return name.decode()

    def set_level(self, name: str) -> None:
        """Sets the instruction set of the process, for tests; all of them give the same bits."""
        self._c.mirror_set_level(self.levels().index(name))


@cache
def host_missing_reason() -> str | None:
    """Returns why the library cannot be used; ``None`` if it can."""
    # Loading it raises AttributeError if a function is missing.
    return unusable_reason(PATH, lambda: host_library() is not None)


@cache
def host_library() -> HostLibrary:
    """Returns the library of this process; the first call loads it."""
    return HostLibrary(PATH)


def require() -> HostLibrary:
    """Returns the library.

    Raises:
        BackendError: the library cannot be used.
    """
    reason = host_missing_reason()
    if reason is not None:
        raise BackendError(f"the backend 'host' cannot be used: {reason}")
    return host_library()


def forget() -> None:
    """Clears the caches, so that the next use loads the library again."""
    host_missing_reason.cache_clear()
    host_library.cache_clear()


def _pack(values: Sequence[int]) -> bytes:
    return array("q", values).tobytes()


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
        return (
            host_missing_reason() if is_simulated(parse(devices)) else "it serves CPU devices only"
        )

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
        if not all(map(Tensor.is_contiguous, chain(*columns))):
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
                _addresses(chain.from_iterable(zip(*same_dtype, strict=True))),
                list(map(Tensor.numel, same_dtype[0])),
                dtype,
                op,
                float(scale),
            )
        if copied:
            with writing_in_place([column[i] for column in columns for i in copied]):
                for i, copies in copied.items():
                    for column, copy in zip(columns, copies, strict=True):
                        column[i].copy_(copy)
        increment_version(chain(*columns))

    def _share_memory(self, columns: Sequence[Sequence[Tensor]]) -> bool:
        rows = list(zip(*columns, strict=True))
        if not all(map(have_same_strides, rows)):
            return super()._share_memory(columns)
        sizes_bytes = [row[0].nbytes for row in rows]
        return bool(rows) and self._library.overlap(_addresses(chain(*rows)), sizes_bytes)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self.check_tensors(tensors, root=root)
        first = tensors[0]
        self._library.broadcast(_addresses(tensors), first.numel(), first.dtype, int(root))
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


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))  # half the time of a loop


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
