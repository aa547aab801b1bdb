"""libnccl: the copy that torch has mapped, and the functions of it that mirror calls."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.cuda import nccl as torch_nccl

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
# Never ncclAvg: on floats it is PreMulSum, which cannot use the adders of an NVLink switch.
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
"""The first version that is supported: 2.18. Its ``ncclConfig_t`` is the layout below."""
SHARED_GPU = 23003
"""The first version whose ranks may share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE is 1."""

_UNDEFINED = -(2**31)
_MAGIC = 0xCAFEBEEF
# One that was replaced on disk while in memory still counts; it cannot be loaded by its name.
_FILE = re.compile(r"libnccl\.so(\.\d+)*( \(deleted\))?")
_INSTALL = (
    "use a torch built for CUDA, which brings it, or install nvidia-nccl-cu12 or -cu13, as "
    "torch.version.cuda says"
)


class UniqueId(ctypes.Structure):
    """ncclUniqueId: what the ranks of one clique have in common; passed by value."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18, and the one field that has since taken the place of its padding.

    The struct is only ever appended to. NCCL copies as many bytes as ``size`` says, and takes its
    defaults for what ``version`` did not have; so this prefix is good for all versions since.
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
    """Returns a configuration with NCCL's defaults, but for calls that never block."""
    config = Config(ctypes.sizeof(Config), _MAGIC, OLDEST, 0)
    for field in ("cgaClusterSize", "minCTAs", "maxCTAs", "splitShare", "trafficClass"):
        setattr(config, field, _UNDEFINED)
    return config


_I, _N, _P = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
# What they take; all return an ncclResult_t. The last two of a collective are the communicator and
# the stream.
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
    """A libnccl. Calls let go of the GIL; what they return is for the caller to look at.

    Attributes:
        path: the file.
        version: as ``ncclGetVersion`` has it: 22809 is 2.28.9.
        functions: by name; each returns an ``ncclResult_t``.
    """

    def __init__(self, path: str | Path) -> None:
        """Loads the library; the copy that is mapped already, if it is that file.

        Raises:
            OSError: there is none at that path, or it does not load.
            AttributeError: it lacks a function.
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
        """Calls one of the functions; returns its ``ncclResult_t``."""
        return self.functions[name](*arguments)

    def explain(self, result: int) -> str:
        """Returns the name of a result, what NCCL says about it, and about its last error."""
        name = RESULTS[result] if 0 <= result < len(RESULTS) else f"result {result}"
        texts = (self._c.ncclGetErrorString(result), self._c.ncclGetLastError(None))
        said = [text.decode(errors="replace").strip() for text in texts if text]
        return f"{name} ({': '.join(filter(None, said))})"


def missing_reason() -> str | None:
    """Returns why there is no libnccl that can be used; ``None`` when there is."""
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
        found = _load(str(path))
    except (OSError, AttributeError) as error:
        return f"{path} does not load ({error}); {_INSTALL}"
    return version_reason(found.version, _version_of_torch())


def version_reason(version: int, built_for: int | None) -> str | None:
    """Returns why a version cannot be used, given the one that torch was built for, if any."""
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


def library() -> NcclLibrary:
    """Returns the libnccl of this process.

    Raises:
        BackendError: there is none that can be used.
    """
    reason = missing_reason()
    if reason is not None:
        raise BackendError(f"the backend 'nccl' cannot be used: {reason}")
    return _load(str((*mapped_files(), packaged_file())[0]))


def mapped_files() -> tuple[str, ...]:
    """Returns the files of the copies of libnccl in this process's memory."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    # address permissions offset device inode path
    columns = [line.split(maxsplit=5) for line in lines]
    files = {c[5] for c in columns if len(c) == 6 and _FILE.fullmatch(Path(c[5]).name)}
    return tuple(sorted(files))


def packaged_file() -> Path | None:
    """Returns the file of the package nvidia-nccl-cu12 or -cu13; both put it in one place."""
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [Path(folder, "nccl", "lib", "libnccl.so.2") for folder in folders or ()]
    return next((file for file in files if file.exists()), None)


def version_name(version: int) -> str:
    """Returns "2.28.9" for 22809; versions before 2.9 counted with one digit less."""
    major, rest = divmod(version, 10000 if version >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


@cache
def _load(path: str) -> NcclLibrary:
    return NcclLibrary(path)


def _version_of_torch() -> int | None:
    """Returns the version of NCCL whose header torch was compiled with, if it was."""
    try:
        major, minor, patch = torch_nccl.version()[:3]
    except AttributeError:  # built without NCCL
        return None
    return int(major) * 10000 + int(minor) * 100 + int(patch)
