"""The C++ library behind the backend "host" (csrc/host/reduce.cpp): loading it and calling it."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from mirror.comm.native_library import unusable_reason
from mirror.errors import BackendError

PATH = Path(__file__).parents[1] / "_reduce.so"

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
# Arrays are handed over as the bytes of an ``array``: a quarter of the time of a ctypes array.
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
    """Where tensors of one dtype lie in a buffer, as the library wants it.

    Args:
        counts: of their elements.
        offsets: where each begins, in elements, and where the last one ends.

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

    ``addresses`` holds one address per replica for each tensor, tensor after tensor. Nothing is
    checked here. Calls let go of the GIL, and use ``torch.get_num_threads()`` threads.
    """

    def __init__(self, path: Path) -> None:
        """Loads the library.

        Raises:
            OSError: there is none at that path, or it does not load.
            AttributeError: it lacks a function: it was built from another version of csrc/.
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
        self, addresses: Sequence[int], places: BufferAddresses, scale: float, tail: bytes, to: int
    ) -> None:
        """Leaves the replicas' sums, multiplied by ``scale``, at their places in a buffer.

        Args:
            tail: what is left behind them, as bytes.
            to: the buffer.
        """
        self._c.mirror_pack_sums(
            _pack(addresses),
            places.counts,
            places.offsets,
            places.num_tensors,
            len(addresses) // places.num_tensors,
            places.dtype,
            scale,
            tail,
            len(tail),
            to,
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
        """Whether two of the tensors share memory."""
        num_replicas = len(addresses) // len(sizes_bytes)
        found = self._c.mirror_overlap(
            _pack(addresses), _pack(sizes_bytes), len(sizes_bytes), num_replicas
        )
        return bool(found)

    def stream_copy(self, to: int, source: int, num_bytes: int, *, past_caches: bool) -> None:
        """Copies multiples of 16 bytes between such addresses: what benchmarks compare with."""
        self._c.mirror_stream_copy(to, source, num_bytes, past_caches, torch.get_num_threads())

    def levels(self) -> tuple[str, ...]:
        """The instruction sets that this machine has loops for, slowest first."""
        current = self._c.mirror_level()
        names: list[str] = []
        while self._c.mirror_set_level(len(names)) == 0:
            names.append(self.level())
        self._c.mirror_set_level(current)
        return tuple(names)

    def level(self) -> str:
        """The instruction set in use."""
        name: bytes = self._c.mirror_level_name(self._c.mirror_level())
        return name.decode()

    def set_level(self, name: str) -> None:
        """Makes the whole process use one of ``levels()``; for tests: the bits are the same."""
        self._c.mirror_set_level(self.levels().index(name))


@cache
def missing_reason() -> str | None:
    """Returns why the library cannot be used; ``None`` when it can."""
    return unusable_reason(PATH, lambda: library() is not None)  # it lacks no function


@cache
def library() -> HostLibrary:
    """Returns the library of this process, which it loads at the first call."""
    return HostLibrary(PATH)


def require() -> HostLibrary:
    """Returns the library.

    Raises:
        BackendError: it cannot be used.
    """
    reason = missing_reason()
    if reason is not None:
        raise BackendError(f"the backend 'host' cannot be used: {reason}")
    return library()


def forget() -> None:
    """Makes the next use look for the library again."""
    missing_reason.cache_clear()
    library.cache_clear()


def _pack(values: Sequence[int]) -> bytes:
    return array("q", values).tobytes()
