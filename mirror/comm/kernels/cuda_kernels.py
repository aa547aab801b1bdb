"""GPUs as a machine for the kernels of csrc/, by CuPy. Needs a GPU to be tested; see there.

Nothing here has been run on a GPU yet: tests/comm/kernels/test_cuda_kernels.py says what will be,
and skips with the reason. What runs without one is the compiler, over the very same source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mirror.comm.kernels.layout import FLAG_BYTES, Arguments, workspace_bytes
from mirror.comm.topology import unreachable_pair
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
_COPIES = ("all_gather", "broadcast")
KERNELS = {
    "direct": ("one_shot", "two_shot", "reduce_scatter", *_COPIES),
    "ring": ("all_reduce", "reduce_scatter", *_COPIES),
    "hierarchical": ("all_reduce", "reduce_scatter", *_COPIES),
}
# kMaxThreads in csrc/collective.h.
_THREADS_PER_BLOCK = 512
# As many as others use who copy by registers (NCCL's rings 16 to 32, vLLM 36); to be measured.
_MAX_BLOCKS = 32
_PEER_ACCESS_ALREADY_ENABLED = 704
_INCLUDE = re.compile(r'^#include "(\w+\.\w+)"$', re.MULTILINE)


class CudaDevices:
    """GPUs, some of which may be those of several replicas.

    All replicas of a GPU are rows of one cooperative launch, on torch's current stream of that
    GPU: all its blocks are resident together, or the launch fails. ``__launch_bounds__`` makes
    one block fit on each multiprocessor, so that there may be as many blocks as those.

    While kernels wait for each other, nothing may wait for one of them before all are launched.
    So modules are loaded, on every device, and all memory is there before the first launch.
    """

    # 4 packs for each thread; below that another block costs more than it brings.
    bytes_per_block = 4 * 16 * _THREADS_PER_BLOCK

    def __init__(self, devices: Sequence[torch.device], source: str, scratch_bytes: int) -> None:
        """Opens the devices' memory to each other, and makes the workspaces.

        Raises:
            BackendError: a GPU has fewer multiprocessors than replicas.
        """
        self._devices = tuple(devices)
        self._rows = {d: [i for i, e in enumerate(devices) if e == d] for d in devices}
        self._source = source
        self._scratch_bytes = scratch_bytes
        self.max_blocks = _MAX_BLOCKS
        for device, rows in self._rows.items():
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            self.max_blocks = min(self.max_blocks, processors // len(rows))
        if self.max_blocks == 0:
            raise BackendError("a GPU has fewer multiprocessors than replicas; use fewer replicas")
        _open_memory(tuple(self._rows))
        # The caching allocator aligns to 512 bytes. Zeroed on the current streams: wait for them.
        num_bytes = workspace_bytes(self.max_blocks, scratch_bytes)
        self._workspaces = [
            torch.zeros(num_bytes, dtype=torch.uint8, device=device) for device in devices
        ]
        # Pinned memory has one address on the host and on all devices.
        self._errors = torch.zeros(len(devices) * FLAG_BYTES, dtype=torch.uint8, pin_memory=True)
        self._synchronize()

    def run(self, kernel: str, dtype: torch.dtype, arguments: Arguments, blocks: int) -> None:
        """Enqueues the kernel on all devices, one right after the other."""
        num_replicas = len(self._devices)
        arguments.workspace[:num_replicas] = [w.data_ptr() for w in self._workspaces]
        arguments.errors = self._errors.data_ptr()
        arguments.scratch_bytes = self._scratch_bytes
        arguments.state_blocks = self.max_blocks
        compiled = _load(self._source, ELEMENTS[dtype], tuple(self._rows))[kernel]
        cupy = import_module("cupy")
        launches = []
        for device, rows in self._rows.items():
            arguments.rows[: len(rows)] = rows
            by_value = np.frombuffer(bytes(arguments), dtype=np.dtype(Arguments))
            stream = torch.cuda.current_stream(device)
            external = cupy.cuda.ExternalStream(stream.cuda_stream, device.index)
            launches.append((device, len(rows), by_value, external))
        for device, num_rows, by_value, external in launches:
            with torch.cuda.device(device):
                # `kernel` is the function on the current device. Only the launch is cooperative:
                # CuPy would link the device runtime for it, a file that toolkits alone have.
                compiled.kernel(
                    (blocks, num_rows),
                    (_THREADS_PER_BLOCK,),
                    (by_value,),
                    stream=external,
                    enable_cooperative_groups=True,
                )

    def error_words(self) -> list[int]:
        words: list[int] = self._errors.view(torch.int32)[:: FLAG_BYTES // 4].tolist()
        return [word & 0xFFFFFFFF for word in words]

    def reset(self) -> None:
        self._synchronize()
        self._errors.zero_()
        for workspace in self._workspaces:
            workspace.zero_()
        self._synchronize()

    def close(self) -> None:
        # Memory must not go to others while a peer's kernel may still write to it.
        self._synchronize()
        self._workspaces = []

    def _synchronize(self) -> None:
        for device in self._rows:
            torch.cuda.synchronize(device)


def missing_reason(pairs: Sequence[tuple[torch.device, torch.device]]) -> str | None:
    """Returns why kernels cannot run on GPUs of which these pairs share memory."""
    if find_spec("cupy") is None:
        return "it needs CuPy on GPUs; install mirror-strategy[cu12] or [cu13]"
    if source_folder() is None:
        return "the sources of its kernels (csrc/) are not installed; reinstall mirror"
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return (
            "CUDA_LAUNCH_BLOCKING=1 makes a kernel end before the one that it waits for is "
            "launched; unset it"
        )
    pair = unreachable_pair(pairs)
    if pair is not None:
        return f"{pair[0]} cannot access the memory of {pair[1]}"
    return None


def source_folder() -> Path | None:
    """Returns the folder of the kernels' source: in the package, or beside it in a checkout."""
    here = Path(__file__).resolve().parents[1]  # mirror/comm
    for folder in (here / "csrc", here.parents[1] / "csrc"):
        if (folder / "portable.h").exists():
            return folder
    return None


def kernel_source(name: str, element: str) -> str:
    """Returns the source of a file of kernels for one element type, headers included.

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

    return f"#define MIRROR_ELEMENT {element}\n{expanded(f'{name}.cu')}"


@cache
def _load(source: str, element: str, devices: tuple[torch.device, ...]) -> dict[str, Any]:
    """Compiles the kernels (CuPy keeps the result on disk) and loads them on every device."""
    module = import_module("cupy").RawModule(
        code=kernel_source(source, element),
        options=OPTIONS,
        backend="nvrtc",
    )
    kernels: dict[str, Any] = {}
    for name in KERNELS[source]:
        kernel = module.get_function(f"{source}_{name}_kernel")
        for device in devices:
            with torch.cuda.device(device):
                # Asking for an attribute loads the kernel now; a launch might find the device
                # busy with one that waits for it.
                if kernel.local_size_bytes > 0:
                    raise BackendError(f"the compiler gave {name} local memory; report this")
        kernels[f"{source}_{name}"] = kernel
    return kernels


def _open_memory(devices: Sequence[torch.device]) -> None:
    """Lets all devices that can do so access each other's memory, torch's and CuPy's."""
    runtime: ModuleType = import_module("cupy").cuda.runtime
    for one in devices:
        for other in devices:
            if one == other or not torch.cuda.can_device_access_peer(one, other):
                continue
            # A copy by torch opens what its allocator maps by itself (expandable segments).
            torch.ones(1, device=other).to(one)
            with torch.cuda.device(one):
                try:
                    runtime.deviceEnablePeerAccess(other.index)
                except runtime.CUDARuntimeError as error:
                    if error.status != _PEER_ACCESS_ALREADY_ENABLED:
                        raise
