"""CudaDevices: GPUs that run the kernels of csrc/, through CuPy; and the kernels' binaries.

It has run on one GPU with several replicas, and not yet on several GPUs. Where there is no GPU,
tests/comm/kernels/test_cuda_kernels.py skips its tests for GPUs with the reason; then only the
compiler is tested, on the same source.

NVRTC compiles the kernels when they are first needed. CuPy appends ``-ftz=true`` to its compiler
options, and NVRTC uses the last option: sums of denormal numbers would be 0 on GPUs, and nowhere
else. So NVRTC is called here, through CuPy's binding, without that option. CuPy only loads the
binary, which is in CuPy's cache folder.

A unit is compiled at once: the reductions of one file for one element type, operation and number
of replicas, or its copies, which work on bytes. A unit takes a second or two, so it is compiled
when it is first used. Units that are known to be needed are compiled in threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from mirror.base.safe_files import private_folder, read_private, replace_atomically
from mirror.comm.communicator import HALF_DTYPES
from mirror.comm.kernels import launcher
from mirror.comm.kernels.launcher import (
    FLAG_BYTES,
    KernelArguments,
    Launch,
    Machine,
    launch,
    workspace_bytes,
)
from mirror.comm.topology import unreachable_pair
from mirror.errors import BackendError

# The most threads of a block.
MAX_THREADS = 512

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


class CudaDevices(Machine):
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
        self.block_limits = ((sys.maxsize, max_blocks or most),)
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
        self._set_memory(arguments)
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
