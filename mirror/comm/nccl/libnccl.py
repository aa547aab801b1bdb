"""libnccl: the copy that torch has loaded, its functions, and the calls of each collective."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.cuda import nccl as torch_nccl

from mirror.comm.packing import chunk_ends
from mirror.errors import BackendError

SUCCESS, IN_PROGRESS = 0, 7
RESULTS = (
    "ncclSuccess",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
    "ncclTimeout",
)
# Not ncclAvg: for floats it is PreMulSum, which cannot use the adders of an NVLink switch.
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3}
DTYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}

OLDEST = 21800
"""The oldest supported version, 2.18; ``Config`` has the layout of its ``ncclConfig_t``."""
SHARED_GPU = 23003
"""The oldest version that allows ranks to share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE is 1."""

_UNDEFINED = -(2**31)
_MAGIC = 0xCAFEBEEF
# A mapped file that was replaced on disk counts as well; it cannot be loaded by its name.
_FILE = re.compile(r"libnccl\.so(\.\d+)*( \(deleted\))?")
_INSTALL = (
    "use a torch built for CUDA, which brings it, or install nvidia-nccl-cu12 or -cu13, as "
    "torch.version.cuda says"
)


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which all ranks of a clique share; passed by value."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18, with one field that has replaced its padding since then.

    New versions only append fields. NCCL copies ``size`` bytes, and uses defaults for fields that
    ``version`` does not have. So this prefix works with all later versions.
    """

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int),
    ]


def non_blocking() -> Config:
    """Returns NCCL's default configuration with non-blocking calls."""
    config = Config(ctypes.sizeof(Config), _MAGIC, OLDEST, 0)
    for field in ("cgaClusterSize", "minCTAs", "maxCTAs", "splitShare", "trafficClass"):
        setattr(config, field, _UNDEFINED)
    return config


_I, _N, _P = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
# The argument types; all functions return an ncclResult_t. The last two arguments of a collective
# are the communicator and the stream.
_SIGNATURES: dict[str, list[type]] = {
    "ncclGetVersion": [ctypes.POINTER(_I)],
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRankConfig": [ctypes.POINTER(_P), _I, UniqueId, _I, ctypes.POINTER(Config)],
    "ncclCommFinalize": [_P],
    "ncclCommDestroy": [_P],
    "ncclCommAbort": [_P],
    "ncclCommGetAsyncError": [_P, ctypes.POINTER(_I)],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclAllReduce": [_P, _P, _N, _I, _I, _P, _P],
    "ncclReduce": [_P, _P, _N, _I, _I, _I, _P, _P],
    "ncclBroadcast": [_P, _P, _N, _I, _I, _P, _P],
    "ncclReduceScatter": [_P, _P, _N, _I, _I, _P, _P],
    "ncclAllGather": [_P, _P, _N, _I, _P, _P],
    "ncclSend": [_P, _N, _I, _I, _P, _P],
    "ncclRecv": [_P, _N, _I, _I, _P, _P],
}


class NcclLibrary:
    """A libnccl. Calls release the GIL; the caller checks their results.

    Attributes:
        path: the file.
        version: from ``ncclGetVersion``: 22809 is 2.28.9.
        functions: by name; each returns an ``ncclResult_t``.
    """

    def __init__(self, path: str | Path) -> None:
        """Loads the library, or uses the loaded copy if it is the same file.

        Raises:
            OSError: the file does not exist or does not load.
            AttributeError: a function is missing.
        """
        self.path = str(path)
        self._c = ctypes.CDLL(self.path)
        self.functions: dict[str, Callable[..., int]] = {}
        for name, argtypes in _SIGNATURES.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = _I, argtypes
            self.functions[name] = function
        self._c.ncclGetErrorString.restype = self._c.ncclGetLastError.restype = ctypes.c_char_p
        self._c.ncclGetErrorString.argtypes, self._c.ncclGetLastError.argtypes = [_I], [_P]
        version = _I(0)
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value

    def call(self, name: str, *arguments: object) -> int:
        """Calls a function by name; returns its ``ncclResult_t``."""
        return self.functions[name](*arguments)

    def explain(self, result: int) -> str:
        """Returns the name of a result, and NCCL's texts for it and for its last error."""
        name = RESULTS[result] if 0 <= result < len(RESULTS) else f"result {result}"
        texts = (self._c.ncclGetErrorString(result), self._c.ncclGetLastError(None))
        lines = [text.decode(errors="replace").strip() for text in texts if text]
        return f"{name} ({': '.join(filter(None, lines))})"


def nccl_missing_reason() -> str | None:
    """Returns why no libnccl can be used; ``None`` if one can."""
    copies = mapped_files()
    if len(copies) > 1:
        return (
            f"two copies of libnccl are loaded, {' and '.join(copies)}, and would disturb each "
            "other; import torch before what brings the other one, or uninstall that"
        )
    path = copies[0] if copies else packaged_file()
    if path is None:
        return f"there is no libnccl: torch has not loaded one and none is installed; {_INSTALL}"
    try:
        loaded = _load(str(path))
    except (OSError, AttributeError) as error:
        return f"{path} does not load ({error}); {_INSTALL}"
    return version_reason(loaded.version, _version_of_torch())


def version_reason(version: int, built_for: int | None) -> str | None:
    """Returns why a version cannot be used; ``built_for`` is the version of torch's header."""
    if not OLDEST <= version < 30000:
        return (
            f"libnccl {version_name(version)} is not one of the versions that mirror knows, 2.18 "
            f"and later 2.x; {_INSTALL}"
        )
    if built_for is not None and version // 100 < built_for // 100:
        return (
            f"libnccl {version_name(version)} is loaded, older than the "
            f"{version_name(built_for)} that torch was built for: another package brought it; "
            "import torch first, or uninstall that package"
        )
    return None


def nccl_library() -> NcclLibrary:
    """Returns the libnccl of this process.

    Raises:
        BackendError: no libnccl can be used.
    """
    reason = nccl_missing_reason()
    if reason is not None:
        raise BackendError(f"the backend 'nccl' cannot be used: {reason}")
    return _load(str((*mapped_files(), packaged_file())[0]))


def mapped_files() -> tuple[str, ...]:
    """Returns the files of the copies of libnccl that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    # address permissions offset device inode path
    columns = [line.split(maxsplit=5) for line in lines]
    files = {c[5] for c in columns if len(c) == 6 and _FILE.fullmatch(Path(c[5]).name)}
    return tuple(sorted(files))


def packaged_file() -> Path | None:
    """Returns the file of the package nvidia-nccl-cu12 or -cu13; both install the same path."""
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [Path(folder, "nccl", "lib", "libnccl.so.2") for folder in folders or ()]
    return next((file for file in files if file.exists()), None)


def version_name(version: int) -> str:
    """Returns "2.28.9" for 22809; numbers before 2.9 have one digit less."""
    major, rest = divmod(version, 10000 if version >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


@cache
def _load(path: str) -> NcclLibrary:
    return NcclLibrary(path)


def _version_of_torch() -> int | None:
    """Returns the version of the NCCL header that torch was compiled with, or None."""
    try:
        major, minor, patch = torch_nccl.version()[:3]
    except AttributeError:  # built without NCCL
        return None
    return int(major) * 10000 + int(minor) * 100 + int(patch)


Call = tuple[int, str, tuple[int, ...]]
"""Replica, function, and its arguments without the last two, communicator and stream."""

_BYTES = DTYPES[torch.uint8]
_JOINT = frozenset({"ncclAllReduce", "ncclAllGather", "ncclReduceScatter"})


def are_joint(calls: Sequence[Call], num_replicas: int) -> bool:
    """Returns whether no replica's part can end before all other parts have started.

    A broadcast's part can: the root is done when it has sent. An exchange of chunks can if one of
    them is empty.
    """
    function = calls[0][1]
    if function == "ncclSend":  # all to all
        return len(calls) == 2 * num_replicas * (num_replicas - 1)
    return function in _JOINT


def all_reduce_calls(wires: Sequence[Tensor], op: str) -> list[Call]:
    count, dtype, number = wires[0].numel(), DTYPES[wires[0].dtype], OPS[op]
    pointers = [wire.data_ptr() for wire in wires]
    return [
        (i, "ncclAllReduce", (pointer, pointer, count, dtype, number))
        for i, pointer in enumerate(pointers)
    ]


def broadcast_calls(tensors: Sequence[Tensor], root: int) -> list[Call]:
    num_bytes = tensors[0].nbytes
    pointers = [tensor.data_ptr() for tensor in tensors]
    return [
        (i, "ncclBroadcast", (pointer, pointer, num_bytes, _BYTES, root))
        for i, pointer in enumerate(pointers)
    ]


def reduce_scatter_calls(wires: Sequence[Tensor], op: str) -> list[Call]:
    n, first, number = len(wires), wires[0], OPS[op]
    dtype, size = DTYPES[first.dtype], first.element_size()
    pointers = [wire.data_ptr() for wire in wires]
    if first.numel() % n == 0:
        count = first.numel() // n
        return [
            (i, "ncclReduceScatter", (pointer, pointer + i * count * size, count, dtype, number))
            for i, pointer in enumerate(pointers)
        ]
    calls: list[Call] = []
    for root, (begin, end) in enumerate(pairwise([0, *chunk_ends(first.numel(), n)])):
        for i, pointer in enumerate(pointers):
            chunk = pointer + begin * size
            if end > begin:
                calls.append((i, "ncclReduce", (chunk, chunk, end - begin, dtype, number, root)))
    return calls


def exchange_calls(chunks: Sequence[Sequence[Tensor]], terms: Sequence[Tensor]) -> list[Call]:
    """Returns calls that send each replica the other replicas' terms of the chunk that it owns.

    Args:
        chunks: ``chunks[i][j]`` is replica ``i``'s term of the chunk of replica ``j``.
        terms: ``terms[j][i]`` receives it.
    """
    calls: list[Call] = []
    for i, row in enumerate(terms):
        begin, num_bytes = row.data_ptr(), row[0].nbytes  # of each term
        for peer in range(len(chunks)):
            if peer == i:
                continue
            sent = chunks[i][peer]
            if sent.numel() > 0:
                calls.append((i, "ncclSend", (sent.data_ptr(), sent.nbytes, _BYTES, peer)))
            if num_bytes > 0:
                target = begin + peer * num_bytes
                calls.append((i, "ncclRecv", (target, num_bytes, _BYTES, peer)))
    return calls


def all_gather_calls(
    tensors: Sequence[Tensor], first: int = 0, num_ranks: int | None = None
) -> list[Call]:
    """Returns calls that copy each rank's chunk to all ranks.

    Args:
        first: the rank of the first tensor, of ``num_ranks`` in all processes.
    """
    n = len(tensors) if num_ranks is None else num_ranks
    numel, size = tensors[0].numel(), tensors[0].element_size()
    pointers = [tensor.data_ptr() for tensor in tensors]
    if numel % n == 0:
        count = numel // n * size
        return [
            (i, "ncclAllGather", (pointer + (first + i) * count, pointer, count, _BYTES))
            for i, pointer in enumerate(pointers)
        ]
    calls: list[Call] = []
    for root, (begin, end) in enumerate(pairwise([0, *chunk_ends(numel, n)])):
        for i, pointer in enumerate(pointers):
            chunk, num_bytes = pointer + begin * size, (end - begin) * size
            if num_bytes > 0:
                calls.append((i, "ncclBroadcast", (chunk, chunk, num_bytes, _BYTES, root)))
    return calls
