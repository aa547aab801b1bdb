"""GPUs as a machine for the kernels of csrc/, by CuPy. Needs a GPU to be tested; see there.

Nothing here has been run on a GPU yet: tests/comm/kernels/test_cuda_kernels.py says what will be,
and skips with the reason. What runs without one is the compiler, over the very same source.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from mirror.comm.kernels import launcher
from mirror.comm.kernels.binaries import Unit, binary, compile_all, source_folder, unit_of
from mirror.comm.kernels.kernel_arguments import (
    ABORTED,
    FLAG_BYTES,
    KernelArguments,
    workspace_bytes,
)
from mirror.comm.kernels.launcher import Launch, launch
from mirror.comm.topology import unreachable_pair
from mirror.errors import BackendError

# kMaxThreads in csrc/collective.h.
_THREADS_PER_BLOCK = 512
# As many as others use who copy by registers (NCCL's rings 16 to 32, vLLM 36). To be measured:
# benchmarks/gpu_blocks.py finds the best for a machine.
_DEFAULT_BLOCKS = 32
_PEER_ACCESS_ALREADY_ENABLED = 704

_Place = tuple[str, torch.device]
"""A kernel, by name, on a device."""


@dataclass(frozen=True)
class _Loaded:
    """A kernel on a device.

    Attributes:
        kernel: CuPy's, which keeps its module loaded.
        function: the driver's handle of it, a CUfunction.
    """

    kernel: Any
    function: int


class CudaDevices:
    """GPUs, some of which may be those of several replicas.

    All replicas of a GPU are rows of one launch, on torch's current stream of that GPU. Where
    there are several, it is a cooperative one: all its blocks are resident together, or it fails.
    ``__launch_bounds__`` makes one block fit on each multiprocessor, so that there may be as many
    blocks as those. A replica alone on its GPU is launched plainly, and need not find room for
    the whole grid at once: a block waits for the blocks of its own number, on other GPUs, and
    blocks start in the order of their numbers.

    While kernels wait for each other, nothing may wait for one of them before all are launched.
    So modules are loaded, on every device, and all memory is there before the first launch.
    """

    # A pack for each thread. With more of them a thread waits for memory more than once, while
    # there are multiprocessors to ask at the same time; with less, threads are idle.
    bytes_per_block = 16 * _THREADS_PER_BLOCK

    def __init__(
        self,
        devices: Sequence[torch.device],
        scratch_bytes: int,
        linked: Sequence[tuple[torch.device, torch.device]],
        max_blocks: int | None = None,
    ) -> None:
        """Opens the devices' memory to each other, and makes the workspaces.

        Args:
            linked: the pairs of which the one reaches the other's memory. No others are opened: a
                GPU has so many peers at most.
            max_blocks: of each replica: all are to be resident at once, one to a multiprocessor.

        Raises:
            BackendError: a GPU has fewer multiprocessors than replicas.
            ValueError: it has fewer than ``max_blocks`` for each of its replicas, or these are
                none.
        """
        self._devices = tuple(devices)
        self._rows = {d: [i for i, e in enumerate(devices) if e == d] for d in devices}
        self._scratch_bytes = scratch_bytes
        most = min(_processors(device) // len(rows) for device, rows in self._rows.items())
        if most == 0:
            raise BackendError("a GPU has fewer multiprocessors than replicas; use fewer replicas")
        if max_blocks is not None and not 1 <= max_blocks <= most:
            raise ValueError(
                f"each replica has 1 to {most} blocks here, one to a multiprocessor of its GPU; "
                f"got max_blocks={max_blocks}"
            )
        self.max_blocks = max_blocks or min(_DEFAULT_BLOCKS, most)
        _open_memory(linked)
        num_bytes = workspace_bytes(self.max_blocks, scratch_bytes)
        # They outlive the inference mode and the default device of their creator.
        with torch.inference_mode(False):
            # The caching allocator aligns to 512 bytes. Zeroed on the current streams: wait.
            self._workspaces = [
                torch.zeros(num_bytes, dtype=torch.uint8, device=device) for device in devices
            ]
            # Pinned memory has one address on the host and on all devices.
            self._errors = torch.zeros(
                len(devices) * FLAG_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        self._synchronize()

    def prepare(self, calls: Iterable[tuple[str, torch.dtype, KernelArguments]]) -> None:
        units = dict.fromkeys(unit_of(*call) for call in calls)
        compile_all(units, {_capability(device) for device in self._rows})

    def run(
        self, kernel: str, dtype: torch.dtype, arguments: KernelArguments, blocks: int
    ) -> None:
        """Enqueues the kernel on all devices, one right after the other."""
        num_replicas = len(self._devices)
        arguments.workspace[:num_replicas] = [w.data_ptr() for w in self._workspaces]
        arguments.errors = self._errors.data_ptr()
        arguments.scratch_bytes = self._scratch_bytes
        arguments.state_blocks = self.max_blocks
        compiled = _load(unit_of(kernel, dtype, arguments), tuple(self._rows))
        launches = []
        for device, rows in self._rows.items():
            arguments.rows[: len(rows)] = rows
            launches.append(
                Launch(
                    function=compiled[kernel, device].function,
                    stream=torch.cuda.current_stream(device).cuda_stream,
                    arguments=ctypes.pointer(KernelArguments.from_buffer_copy(arguments)),
                    device=device.index,
                    blocks=blocks,
                    rows=len(rows),
                    threads=_THREADS_PER_BLOCK,
                    is_cooperative=len(rows) > 1,
                )
            )
        launch(launches, kernel)

    def error_words(self) -> list[int]:
        words: list[int] = self._errors.view(torch.int32)[:: FLAG_BYTES // 4].tolist()
        return [word & 0xFFFFFFFF for word in words]

    def abort(self) -> None:
        # From another thread than that of the kernels, which look at these words as they wait.
        self._errors.view(torch.int32)[:: FLAG_BYTES // 4].fill_(ABORTED)

    def reset(self) -> None:
        self._synchronize()
        self._errors.zero_()
        for workspace in self._workspaces:
            workspace.zero_()
        self._synchronize()

    def close(self) -> None:
        if self._workspaces:
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
    return launcher.missing_reason()


@cache
def _load(unit: Unit, devices: tuple[torch.device, ...]) -> dict[_Place, _Loaded]:
    """Loads a unit on every device; compiles it first if needed."""
    cupy = import_module("cupy")
    kernels: dict[_Place, _Loaded] = {}
    for device in devices:
        module = cupy.RawModule(path=str(binary(unit, _capability(device))))
        for name in unit.kernels:
            kernel = module.get_function(f"{name}_kernel")
            with torch.cuda.device(device):
                # Asking for an attribute loads the kernel now; a launch might find the device
                # busy with one that waits for it.
                if kernel.local_size_bytes > 0:
                    raise BackendError(f"the compiler gave {name} local memory; report this")
                # `.kernel` is the function on the current device.
                kernels[name, device] = _Loaded(kernel, kernel.kernel.ptr)
    return kernels


def _processors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _open_memory(pairs: Sequence[tuple[torch.device, torch.device]]) -> None:
    """Lets the first device of each pair access the second one's memory, torch's and CuPy's."""
    runtime: ModuleType = import_module("cupy").cuda.runtime
    for one, other in dict.fromkeys(pairs):
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
