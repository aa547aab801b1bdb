"""Binaries of the kernels in csrc/: compiled by NVRTC when first needed, and kept on disk.

[Note: Compiled by ourselves]
CuPy appends ``-ftz=true`` to whatever it compiles, and NVRTC takes the last word: sums of denormal
numbers would be 0 on GPUs, and nowhere else. So NVRTC is called here, by CuPy's binding, without
that option; CuPy only loads the result, which lies where CuPy keeps its own.

A unit is what is compiled at once: the reductions of one file for one element type, or its copies,
which see bytes. A unit takes seconds, so those that will be needed are compiled in threads.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mirror.errors import BackendError

# No contraction: a * b + c must have the same bits as on simulated devices.
OPTIONS = ("--std=c++20", "--fmad=false")
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
COPIES = "copies"
"""The unit of a file's kernels that see bytes; the others are named by their element type."""
_REDUCTIONS = {
    "direct": ("one_shot", "two_shot", "reduce_scatter"),
    "ring": ("all_reduce", "reduce_scatter"),
    "hierarchical": ("all_reduce", "reduce_scatter"),
}
_COPIES = ("all_gather", "broadcast")
_INCLUDE = re.compile(r'^#include "(\w+\.\w+)"$', re.MULTILINE)


def kernels_of(source: str, unit: str) -> tuple[str, ...]:
    """Returns the names of a unit's kernels, without their suffix ``_kernel``."""
    names = _COPIES if unit == COPIES else _REDUCTIONS[source]
    return tuple(f"{source}_{name}" for name in names)


def unit_of(kernel: str, dtype: torch.dtype) -> str:
    """Returns the unit that has a kernel, by name, for an element type."""
    return COPIES if kernel.endswith(_COPIES) else ELEMENTS[dtype]


def source_folder() -> Path | None:
    """Returns the folder of the kernels' source: in the package, or beside it in a checkout."""
    here = Path(__file__).resolve().parents[1]  # mirror/comm
    for folder in (here / "csrc", here.parents[1] / "csrc"):
        if (folder / "portable.h").exists():
            return folder
    return None


def unit_source(source: str, unit: str) -> str:
    """Returns the text of a unit, headers included.

    One piece of text is all that a compiler in a library takes without a search path.

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
        return expanded(match[1])

    def expanded(file: str) -> str:
        text = (folder / file).read_text(encoding="ascii")
        return _INCLUDE.sub(include, text.replace("#pragma once\n", ""))

    define = "MIRROR_COPIES" if unit == COPIES else f"MIRROR_ELEMENT {unit}"
    return f"#define {define}\n{expanded(f'{source}.cu')}"


def compile_all(source: str, units: Iterable[str], capabilities: Iterable[int]) -> None:
    """Compiles those units of a file that are not there yet, in as many threads as may run.

    Args:
        capabilities: of the GPUs, 90 for 9.0.
    """
    wanted = [(unit, capability) for unit in units for capability in capabilities]
    num_threads = max(min(os.cpu_count() or 1, len(wanted)), 1)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="mirror compiler") as pool:
        for done in [pool.submit(binary, source, unit, c) for unit, c in wanted]:
            done.result()


def binary(source: str, unit: str, capability: int) -> Path:
    """Returns the file with a unit's binary for GPUs of a capability; compiles it if need be.

    Raises:
        BackendError: the compiler refuses the source, or there is none.
    """
    nvrtc = import_module("cupy.cuda").nvrtc
    architecture = _architecture(capability)
    options = (*OPTIONS, f"--gpu-architecture={architecture}")
    text = unit_source(source, unit)
    facts = repr((text, options, nvrtc.getVersion()))
    name = f"mirror_{hashlib.sha256(facts.encode()).hexdigest()}.bin"
    file = _folder() / name
    if not file.exists():
        made = _compiled(nvrtc, text, options, is_machine_code=architecture.startswith("sm_"))
        # Whoever else compiles the same, in another process say, never reads half a file.
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=name, delete=False) as new:
            new.write(made)
        os.replace(new.name, file)
    return file


def _architecture(capability: int) -> str:
    """Returns what to compile for: the GPU, or for one newer than the compiler what it translates.

    That is done by the driver, which is as new as the GPU.
    """
    known = import_module("cupy.cuda").nvrtc.getSupportedArchs()
    if capability in known:
        return f"sm_{capability}"
    return f"compute_{max(known)}" if capability > max(known) else f"sm_{capability}"


def _compiled(nvrtc: Any, text: str, options: tuple[str, ...], *, is_machine_code: bool) -> bytes:
    program = nvrtc.createProgram(text, "mirror.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip()
            raise BackendError(f"NVRTC refuses a kernel: {error}: {log}; report this") from None
        made = nvrtc.getCUBIN(program) if is_machine_code else nvrtc.getPTX(program)
        return made.encode() if isinstance(made, str) else bytes(made)  # before CuPy 14, after
    finally:
        nvrtc.destroyProgram(program)


@cache
def _folder() -> Path:
    """Returns CuPy's folder of compiled kernels, or a new one where that cannot be written."""
    folder = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="mirror-kernels-"))
