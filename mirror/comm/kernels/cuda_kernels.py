"""CudaDevices: GPUs that run the kernels of csrc/, through CuPy.

It has run on one GPU with several replicas, and not yet on several GPUs. Where there is no GPU,
tests/comm/kernels/test_cuda_kernels.py skips its tests for GPUs with the reason; then only the
compiler is tested, on the same source.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from mirror.comm.kernels import launcher
from mirror.comm.kernels.binaries import (
    MAX_THREADS,
    Unit,
    binary,
    compile_all,
    source_folder,
    unit_of,
)
from mirror.comm.kernels.launcher import (
    ABORTED,
    FLAG_BYTES,
    KernelArguments,
    Launch,
    launch,
    workspace_bytes,
)
from mirror.comm.topology import unreachable_pair
from mirror.errors import BackendError

_ALL = sys.maxsize
"""As many blocks as fit."""

# The default number of blocks of a replica, for messages of up to so many bytes. The best of one
# H200 with two replicas were 8 to 16 for small messages, and 48 to 64 of 66 possible ones for
# 64 MiB (benchmarks/README.md, "One GPU"). What lies between is interpolated, and nothing is
# measured on several GPUs, where blocks compete with computation: other libraries that copy
# through registers use 16 to 36 there. benchmarks/gpu_blocks.py finds the best for a machine.
_BLOCKS = (
    # bytes         one GPU  several GPUs
    (256 * 2**10, 8, 8),
    (4 * 2**20, 16, 16),
    (16 * 2**20, 32, 32),
    (sys.maxsize, _ALL, 64),
)
_PEER_ACCESS_ALREADY_ENABLED = 704

_logger = logging.getLogger("mirror")

_KernelKey = tuple[str, torch.device]
"""The name of a kernel, and its device."""


@dataclass(frozen=True)
class _Loaded:
    """A kernel on a device.

    Attributes:
        kernel: CuPy's object, which keeps the module loaded.
        function: the driver's handle, a CUfunction.
        local_bytes: the local memory of each of its threads.
    """

    kernel: Any
    function: int
    local_bytes: int


class CudaDevices:
    """GPUs, each with one or several replicas.

    All replicas of a GPU are rows of one launch, on torch's current stream of that GPU. If there
    are several rows, the launch is cooperative: all its blocks are resident together, or it fails.
    ``__launch_bounds__`` makes one block fit on each multiprocessor, so there may be as many
    blocks as multiprocessors. A single replica has an ordinary launch. Its blocks need not all
    be resident: a block waits only for blocks of its own number on other GPUs, and blocks start in
    the order of their numbers.

    Kernels wait for each other, so nothing may wait for one of them before all are launched. So
    modules are loaded on every device, and all memory is allocated, before the first launch;
    local memory, too: see ``_warm_up``.
    """

    # One pack per thread. With more, a thread waits for memory several times while other
    # multiprocessors are free; with less, threads are idle.
    bytes_per_block = 16 * MAX_THREADS

    def __init__(
        self,
        devices: Sequence[torch.device],
        scratch_bytes: int,
        linked: Sequence[tuple[torch.device, torch.device]],
        max_blocks: int | None = None,
    ) -> None:
        """Enables peer access, and allocates the workspaces.

        Args:
            linked: the pairs where the first device accesses the second's memory. Only these are
                enabled, because the number of a GPU's peers is limited.
            max_blocks: of each replica, for all messages; all are resident at once, one per
                multiprocessor. By default it depends on the message: see ``default_limits``.

        Raises:
            BackendError: a GPU has fewer multiprocessors than replicas.
            ValueError: ``max_blocks`` is not positive, or a GPU has too few multiprocessors.
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
        self.block_limits: Sequence[tuple[int, int]] = ((sys.maxsize, max_blocks or most),)
        if max_blocks is None:
            self.block_limits = default_limits(most, len(self._rows))
        self.max_blocks = self.block_limits[-1][1]
        _enable_peer_access(linked)
        num_bytes = workspace_bytes(self.max_blocks, scratch_bytes)
        # The workspaces outlive the inference mode and the default device of their creator.
        with torch.inference_mode(False):
            # The caching allocator aligns to 512 bytes.
            self._workspaces = [
                torch.zeros(num_bytes, dtype=torch.uint8, device=device) for device in devices
            ]
            # Pinned memory has one address on the host and on all devices.
            self._errors = torch.zeros(
                len(devices) * FLAG_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        self._synchronize()  # the zeros were enqueued on the current streams

    def prepare(self, calls: Iterable[tuple[str, torch.dtype, KernelArguments]]) -> None:
        units = dict.fromkeys(unit_of(*call) for call in calls)
        compile_all(units, {_capability(device) for device in self._rows})

    def run(
        self, kernel: str, dtype: torch.dtype, arguments: KernelArguments, blocks: int
    ) -> None:
        """Enqueues the kernel on all devices, by one call of the launcher."""
        num_replicas = len(self._devices)
        arguments.workspace[:num_replicas] = [w.data_ptr() for w in self._workspaces]
        arguments.errors = self._errors.data_ptr()
        arguments.scratch_bytes = self._scratch_bytes
        arguments.state_blocks = self.max_blocks
        unit = unit_of(kernel, dtype, arguments)
        compiled = _load(unit, tuple(self._rows))
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
                    threads=unit.num_threads,
                    is_cooperative=len(rows) > 1,
                )
            )
        launch(launches, kernel)

    def error_words(self) -> list[int]:
        words: list[int] = self._errors.view(torch.int32)[:: FLAG_BYTES // 4].tolist()
        return [word & 0xFFFFFFFF for word in words]

    def abort(self) -> None:
        # Waiting kernels poll these words, so another thread can call this.
        self._errors.view(torch.int32)[:: FLAG_BYTES // 4].fill_(ABORTED)

    def reset(self) -> None:
        self._synchronize()
        self._errors.zero_()
        for workspace in self._workspaces:
            workspace.zero_()
        self._synchronize()

    def close(self) -> None:
        if self._workspaces:
            # A peer's kernel may still write to this memory, which must not be reused before.
            self._synchronize()
            self._workspaces = []

    def _synchronize(self) -> None:
        for device in self._rows:
            torch.cuda.synchronize(device)


def default_limits(most: int, num_gpus: int) -> Sequence[tuple[int, int]]:
    """Returns the default ``Machine.block_limits``.

    On several GPUs a collective takes at most half of a GPU's multiprocessors. Otherwise those of
    two communicators could each fill one GPU, and wait for their own blocks on the other one,
    forever. Replicas that share the only GPU are launched together, and wait for no other launch.

    Args:
        most: the blocks of a replica that are resident at once on every GPU.
    """
    largest = most if num_gpus == 1 else max(1, most // 2)
    column = 1 if num_gpus == 1 else 2
    return tuple((row[0], min(row[column], largest)) for row in _BLOCKS)


def kernels_missing_reason(pairs: Sequence[tuple[torch.device, torch.device]]) -> str | None:
    """Returns why kernels cannot run on GPUs with these pairs of peers; ``None`` if they can."""
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
    return launcher.launcher_missing_reason()


@cache
def _load(unit: Unit, devices: tuple[torch.device, ...]) -> dict[_KernelKey, _Loaded]:
    """Loads a unit on every device; compiles it first if needed."""
    cupy = import_module("cupy")
    kernels: dict[_KernelKey, _Loaded] = {}
    for device in devices:
        module = cupy.RawModule(path=str(binary(unit, _capability(device))))
        for name in unit.kernels:
            kernel = module.get_function(f"{name}_kernel")
            with torch.cuda.device(device):
                # Reading an attribute loads the kernel now. At the launch, the device might be
                # busy with a kernel that waits for this one.
                local_bytes = kernel.local_size_bytes
                # `.kernel` is the function on the current device.
                kernels[name, device] = _Loaded(kernel, kernel.kernel.ptr, local_bytes)
    _warm_up(unit, {key: kernel for key, kernel in kernels.items() if kernel.local_bytes > 0})
    return kernels


def _warm_up(unit: Unit, kernels: Mapping[_KernelKey, _Loaded]) -> None:
    """Launches kernels of a unit that have local memory, once, without elements; warns of them.

    [Note: Local memory]
    Problem: a GPU has one pool of local memory. The first launch that needs more per thread than
    any before it makes the pool larger, and waits until the GPU is idle. If a kernel spins there
    whose peer this thread launches later, neither continues before the deadline.
    Rule: the first launch of such a kernel is not part of a collective. Without elements it ends
    at once, and moves no flag or counter (MIRROR_KERNEL_OF in csrc/collective.h). All that was
    enqueued before, by any library, is done: the GPUs are synchronized. What another thread has
    enqueued since ends by itself if it is ours: launches take turns (``launch_order``), so a
    collective is on all its GPUs. Kernels of another library that another thread launches in
    between, and whose peers wait for this launch, are not excluded.
    """
    if not kernels:
        return
    for device in dict.fromkeys(device for _, device in kernels):
        torch.cuda.synchronize(device)
    no_elements = KernelArguments()
    launches = [
        Launch(
            function=kernel.function,
            stream=torch.cuda.current_stream(device).cuda_stream,
            arguments=ctypes.pointer(no_elements),
            device=device.index,
            blocks=_processors(device),  # as many as a collective has at most
            rows=1,
            threads=unit.num_threads,
        )
        for (_, device), kernel in kernels.items()
    ]
    launch(launches, "kernels with local memory")
    _logger.warning(
        "the CUDA compiler gave kernels local memory, which may make them slower: %s bytes per "
        "thread. They were launched once without data, so that the driver reserves this memory "
        "while no collective waits. Another version of NVRTC may need none: pip install --upgrade "
        "nvidia-cuda-nvrtc, or nvidia-cuda-nvrtc-cu12; report this with its version and %s",
        ", ".join(f"{name} on {d} {one.local_bytes}" for (name, d), one in kernels.items()),
        unit,
    )


def _processors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _enable_peer_access(pairs: Sequence[tuple[torch.device, torch.device]]) -> None:
    """Enables access of the first device of each pair to the second one's memory."""
    one_way = [(one, other) for one, other in pairs if (other, one) not in pairs]
    assert not one_way, f"peers must access each other's memory; one way alone: {one_way}"
    runtime: ModuleType = import_module("cupy").cuda.runtime
    for one, other in dict.fromkeys(pairs):
        if one == other or not torch.cuda.can_device_access_peer(one, other):
            continue
        # A copy makes torch enable access to memory that its allocator maps (expandable segments):
        # of the device that has the source to the other's memory. That is the opposite direction,
        # and of use because the opposite pair is there as well.
        torch.ones(1, device=other).to(one)
        with torch.cuda.device(one):
            try:
                runtime.deviceEnablePeerAccess(other.index)
            except runtime.CUDARuntimeError as error:
                if error.status != _PEER_ACCESS_ALREADY_ENABLED:
                    raise
