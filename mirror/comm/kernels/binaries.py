"""Binaries of the kernels in csrc/, which NVRTC compiles when first needed; cached on disk.

CuPy appends ``-ftz=true`` to its compiler options, and NVRTC uses the last option: sums of
denormal numbers would be 0 on GPUs, and nowhere else. So NVRTC is called here, through CuPy's
binding, without that option. CuPy only loads the binary, which is in CuPy's cache folder.

A unit is compiled at once: the reductions of one file for one element type, operation and number
of replicas, or its copies, which work on bytes. A unit takes a second or two, so it is compiled
when it is first used. Units that are known to be needed are compiled in threads.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mirror.base.safe_files import private_folder, read_private, replace_atomically
from mirror.comm.communicator import HALF_DTYPES
from mirror.comm.kernels.launcher import KernelArguments
from mirror.errors import BackendError

# No contraction: a * b + c must have the same bits as on simulated devices. Before CUDA 13,
# generic lambdas count as functions of the host, even inside functions of the device.
OPTIONS = ("--std=c++20", "--fmad=false", "--device-as-default-execution-space")
# The names in csrc/portable.h.
ELEMENTS = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int32: "int",
    torch.int64: "long long",
    torch.uint8: "unsigned char",
}
# The most threads of a block.
MAX_THREADS = 512
# Op in csrc/portable.h, in the order of mirror.comm.communicator.OPS.
_OPS = ("kSum", "kMin", "kMax", "kProd")
_REDUCTIONS = {
    "direct": ("one_shot", "two_shot", "reduce_scatter"),
    "ring": ("all_reduce", "reduce_scatter"),
    "hierarchical": ("all_reduce", "reduce_scatter"),
}
_COPIES = ("all_gather", "broadcast")
_INCLUDE = re.compile(r'^#include "(\w+\.\w+)"$', re.MULTILINE)


class Unit(NamedTuple):
    """The parameters of one compilation; those that a source does not need are 0.

    Attributes:
        source: the file in csrc/, without its suffix.
        element: the element type of the file's reductions; "" for its copies.
        op: the number of the operation, as in ``KernelArguments``.
        rounds: whether partial sums are sent as elements.
    """

    source: str
    element: str = ""
    op: int = 0
    num_replicas: int = 0
    island_size: int = 0
    rounds: bool = False

    @property
    def num_threads(self) -> int:
        """The number of threads of a block of its kernels, which share 65,536 registers.

        512 threads may have 128 registers each. Where some versions of NVRTC need more, and use
        local memory instead, there are 256 threads with up to 255: for bytes, each of which is in
        a register of its own while it is reduced, and where more than 8 replicas are read at once.
        """
        return 256 if self.element == "unsigned char" or self.num_replicas > 8 else MAX_THREADS

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of its kernels, without their suffix ``_kernel``."""
        names = _REDUCTIONS[self.source] if self.element else _COPIES
        return tuple(f"{self.source}_{name}" for name in names)


def unit_of(kernel: str, dtype: torch.dtype, arguments: KernelArguments) -> Unit:
    """Returns the unit with a kernel, from its name, element type and arguments."""
    source = kernel.partition("_")[0]
    if kernel.endswith(_COPIES):
        return Unit(source)
    # A ring reads from one replica at a time, for any number of replicas.
    num_replicas = 0 if source == "ring" else arguments.num_replicas
    island_size = arguments.island_size if source == "hierarchical" else 0
    # "direct" sends no partial sums, and those of wide types are elements anyway.
    rounds = bool(arguments.rounds) and dtype in HALF_DTYPES and source != "direct"
    return Unit(source, ELEMENTS[dtype], arguments.op, num_replicas, island_size, rounds)


def source_folder() -> Path | None:
    """Returns the folder of the kernels' source: in the package, or next to it in a checkout."""
    comm = Path(__file__).resolve().parents[1]
    for folder in (comm / "csrc", comm.parents[1] / "csrc"):
        if (folder / "portable.h").exists():
            return folder
    return None


def unit_source(unit: Unit) -> str:
    """Returns the text of a unit, headers included, since NVRTC has no search path for them.

    Raises:
        BackendError: the sources are not installed.
    """
    folder = source_folder()
    if folder is None:
        raise BackendError("the sources of the kernels (csrc/) are not installed")
    included = set()

    def include(match: re.Match[str]) -> str:
        if match[1] in included:
            return ""
        included.add(match[1])
        return expand(match[1])

    def expand(file: str) -> str:
        text = (folder / file).read_text(encoding="ascii")
        return _INCLUDE.sub(include, text.replace("#pragma once\n", ""))

    defined = ["MIRROR_COPIES"]
    if unit.element:
        defined = [
            f"MIRROR_ELEMENT {unit.element}",
            f"MIRROR_OP {_OPS[unit.op]}",
            f"MIRROR_REPLICAS {unit.num_replicas}",
            f"MIRROR_ISLAND {unit.island_size}",
            f"MIRROR_ROUNDS {int(unit.rounds)}",
        ]
    defined.append(f"MIRROR_THREADS {unit.num_threads}")
    head = "".join(f"#define {what}\n" for what in defined)
    return head + expand(f"{unit.source}.cu")


def compile_all(units: Iterable[Unit], capabilities: Collection[int]) -> None:
    """Compiles the units that are not in the cache, in parallel threads.

    Args:
        capabilities: of the GPUs, 90 for 9.0.
    """
    wanted = [(unit, capability) for unit in units for capability in capabilities]
    num_threads = max(min(os.cpu_count() or 1, len(wanted)), 1)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="mirror compiler") as pool:
        for done in [pool.submit(binary, unit, c) for unit, c in wanted]:
            done.result()


def binary(unit: Unit, capability: int) -> Path:
    """Returns the file with a unit's binary for GPUs of a capability; compiles it if necessary.

    Raises:
        BackendError: the compiler refuses the source, or the source is not installed.
    """
    nvrtc = import_module("cupy.cuda").nvrtc
    architecture = _architecture(capability)
    options = (*OPTIONS, f"--gpu-architecture={architecture}")
    text = unit_source(unit)
    facts = repr((text, options, nvrtc.getVersion()))
    name = f"mirror_{hashlib.sha256(facts.encode()).hexdigest()}.bin"
    file = _folder() / name
    try:
        read_private(file)
    except OSError:  # it does not exist, or another user can change it
        data = _compile(nvrtc, text, options, is_machine_code=architecture.startswith("sm_"))
        # Another process that compiles the same unit never reads a partial file.
        with replace_atomically(file, 0o600) as new:
            new.write(data)
    return file


def _architecture(capability: int) -> str:
    """Returns the architecture to compile for.

    For a GPU that is newer than the compiler, the result is PTX, which the driver translates.
    """
    known = import_module("cupy.cuda").nvrtc.getSupportedArchs()
    if capability in known:
        return f"sm_{capability}"
    return f"compute_{max(known)}" if capability > max(known) else f"sm_{capability}"


def _compile(nvrtc: Any, text: str, options: tuple[str, ...], *, is_machine_code: bool) -> bytes:
    program = nvrtc.createProgram(text, "mirror.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip()
            raise BackendError(f"NVRTC refuses a kernel: {error}: {log}; report this") from None
        data = nvrtc.getCUBIN(program) if is_machine_code else nvrtc.getPTX(program)
        return data.encode() if isinstance(data, str) else bytes(data)  # str before CuPy 14
    finally:
        nvrtc.destroyProgram(program)


@cache
def _folder() -> Path:
    """Returns CuPy's folder of compiled kernels, or a new one.

    A new one is used if that is not writable, or if other users can change it.
    """
    folder = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
    try:
        folder = private_folder(folder, create=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="mirror-kernels-"))
