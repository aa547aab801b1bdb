"""CuPy and the driver's launches on simulated GPUs: they run the kernels of csrc/ on the CPU.

A collective is a launch on every GPU. All are run at once by the library that simulated devices
use: their threads wait for each other as blocks of GPUs do. None begins before all streams have
come to it, and none ends before the others have done with its memory.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

from mirror.comm import self_test
from mirror.comm.communicator import DTYPES
from mirror.comm.kernels import cuda_kernels, launcher, simulator
from mirror.comm.kernels.cuda_kernels import ELEMENTS
from mirror.comm.kernels.launcher import KernelArguments, workspace_bytes
from tests.gpu.fake import FakeGpus

_THREADS_PER_BLOCK = 2  # each is a thread of the system


class FakeCupy:
    """What mirror asks of the module ``cupy``, and of the launcher, for simulated GPUs.

    As the driver, it has a pool of local memory per GPU. A launch that makes the pool larger waits
    for all work of the GPU: that is an error if there may be any.

    Attributes:
        launches: the names of the kernels, one for each collective.
        local_bytes: the local memory of kernels, by name; 0 where it is not set.
        pools: the local memory that has been reserved, by GPU.
    """

    def __init__(self, gpus: FakeGpus) -> None:
        self._gpus = gpus
        self.launches: list[str] = []
        self.local_bytes: dict[str, int] = {}
        self.pools: dict[int, int] = {}
        self._functions: list[tuple[str, torch.dtype]] = []
        self.module = ModuleType("cupy")
        self.module.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        runtime = SimpleNamespace(
            deviceEnablePeerAccess=lambda index: None, CUDARuntimeError=RuntimeError
        )
        self.module.cuda = SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
        self.module.RawModule = self._load  # type: ignore[attr-defined]

    def _load(self, path):
        unit = path.partition("/")[2]
        dtype = {name: dtype for dtype, name in ELEMENTS.items()}.get(unit, torch.uint8)

        def get_function(name):
            self._functions.append((name.removesuffix("_kernel"), dtype))
            pointer = SimpleNamespace(ptr=len(self._functions))
            local_bytes = self.local_bytes.get(self._functions[-1][0], 0)
            return SimpleNamespace(local_size_bytes=local_bytes, kernel=pointer)

        return SimpleNamespace(get_function=get_function)

    def launch(self, launches, what):
        """Does what the driver does with all launches of a collective."""
        for one in launches:
            self._reserve(one.device, self._functions[one.function - 1][0])
        if launches[0].arguments.contents.count == 0:
            return  # each is alone, and ends at once
        (name, dtype) = self._functions[launches[0].function - 1]
        assert {self._functions[one.function - 1] for one in launches} == {(name, dtype)}
        self.launches.append(name)
        streams, given = self._gpus.streams, launches[0].arguments.contents
        begun = [
            (
                streams.everywhere[one.device, one.stream or 0].agent,
                one.arguments.contents.rows[: one.rows],
            )
            for one in launches
        ]
        assert sorted(r for _, rows in begun for r in rows) == list(range(given.num_replicas))
        with streams.lock:
            self._touch(name, given, [agent for agent, _ in begun], begun, launches[0].blocks)
        together = KernelArguments.from_buffer_copy(given)
        together.rows[: given.num_replicas] = range(given.num_replicas)
        result = simulator.simulator_library().mirror_simulate(
            (ctypes.c_char_p * 1)(name.encode()),
            (ctypes.c_int * 1)(DTYPES.index(dtype)),
            ctypes.byref(together),
            1,
            launches[0].blocks,
            _THREADS_PER_BLOCK,
            0,
            None,
        )
        assert result == 0, name

    def _reserve(self, device, name):
        """Makes the pool of a device as large as the kernel needs it."""
        if self.local_bytes.get(name, 0) <= self.pools.get(device, 0):
            return
        streams = self._gpus.streams
        with streams.lock:
            agents = [s.agent for (index, _), s in streams.everywhere.items() if index == device]
            busy = [a for a in agents if not self._gpus.order.host.knows({a: a.now})]
        assert not busy, f"the launch of {name} waits for {busy}"
        self.pools[device] = self.local_bytes[name]

    def _touch(self, name, given, agents, begun, blocks):
        """Tells what the kernels read and write: their tensors, and parts of workspaces."""
        _meet(agents)
        for agent, rows in begun:
            self._gpus.order.enqueue(agent)
            for r in rows:
                for address, num_bytes in (
                    (given.data[r], given.count * given.element_bytes),
                    (given.workspace[r], workspace_bytes(blocks, given.scratch_bytes)),
                ):
                    self._gpus.table.access_raw(agent, address, num_bytes, writes=True, what=name)
        _meet(agents)


def _meet(agents):
    clocks = [agent.snapshot() for agent in agents]
    for agent in agents:
        for clock in clocks:
            agent.learn(clock)


@contextmanager
def gpus_with_cupy(num_devices):
    """Gives simulated GPUs, and CuPy on them, for as long as the context is entered."""
    with FakeGpus(num_devices) as gpus:
        gpus.cupy = cupy = FakeCupy(gpus)
        cuda_kernels._load.cache_clear()
        # Not by mock.patch.dict, which would take what is imported meanwhile away again.
        before = sys.modules.get("cupy")
        sys.modules["cupy"] = cupy.module
        try:
            with (
                mock.patch.object(cuda_kernels, "binary", _name_of_binary),
                mock.patch.object(cuda_kernels, "compile_all"),
                mock.patch.object(cuda_kernels, "launch", cupy.launch),
                mock.patch.object(launcher, "launcher_missing_reason", return_value=None),
                mock.patch.object(
                    self_test, "unsafe_reason", return_value=None
                ),  # no real process
            ):
                yield gpus
        finally:
            del sys.modules["cupy"]
            if before is not None:
                sys.modules["cupy"] = before
            cuda_kernels._load.cache_clear()


def _name_of_binary(unit, capability):
    return f"{unit.source}/{unit.element}"
