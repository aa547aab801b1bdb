"""The backends "direct", "ring" and "hierarchical": collectives that are kernels of csrc/.

    direct         every replica accesses the memory of all other replicas
    ring           replica i sends only to replica i + 1, in a pipeline
    hierarchical   reduces inside islands of replicas, then between the islands

Their base ``KernelCommunicator`` runs the kernels on a ``Machine``: GPUs, or simulated devices.
"""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import ClassVar

import torch
from torch import Tensor

from mirror.comm.collective_lock import cannot_wait_for, lock_of
from mirror.comm.communicator import DEFAULT_TIMEOUT_SECONDS, OPS, Communicator
from mirror.comm.kernels import cuda_kernels, simulator
from mirror.comm.kernels.launcher import (
    ABORTED,
    MAX_REPLICAS,
    PACK_BYTES,
    KernelArguments,
    Machine,
)
from mirror.comm.registry import register
from mirror.comm.topology import check_islands, islands_of
from mirror.devices import is_simulated, parse
from mirror.errors import BackendError, CollectiveTimeoutError, short_repr
from mirror.values import check_timeout, is_int

# An error word has the number of a call; names of this many calls are kept for messages.
_REMEMBERED_CALLS = 1024
_CALL_NUMBERS = 1 << 23

_logger = logging.getLogger("mirror")


class KernelCommunicator(Communicator):
    """Collectives that are kernels: run by CuPy on GPUs, by threads on simulated devices.

    On GPUs the collectives are enqueued on each device's current stream; all replicas of a device
    share one launch. A wait ends at its deadline. On simulated devices the same collective then
    raises ``CollectiveTimeoutError``, on GPUs the next one.

    **It has run with several replicas on one GPU, and not yet on several GPUs**; there a self-test
    on the same devices, which moves data, must pass before its first use.

    Attributes:
        source: the file in csrc/ with the kernels.
        scratch_bytes: the scratch memory of each block of each replica.
        partial_sums: "exact" or "rounded", see ``check_partial_sums``.
    """

    waits = True
    needs_trial = True
    risky = True
    source: ClassVar[str]
    simulated_scratch_bytes: ClassVar[int]
    cuda_scratch_bytes: ClassVar[int]
    partial_sums = "exact"

    def __init__(
        self,
        devices: Sequence[torch.device | str],
        *,
        timeout_seconds: float | None = None,
        max_blocks: int | None = None,
    ) -> None:
        """Allocates the workspaces.

        Args:
            timeout_seconds: how long a replica may wait inside a collective; by default 600 s.
            max_blocks: the number of thread blocks that a kernel may have on each replica. It does
                not change the bits of results. The default depends on the machine and on the size
                of the message.

        Raises:
            BackendError: the kernels cannot be run here; see ``unavailable_reason``.
            DeviceError: a device does not exist.
            ValueError: the timeout is negative, or ``max_blocks`` is not positive or too large.
        """
        super().__init__(devices)
        check_timeout(timeout_seconds)
        if max_blocks is not None and not is_int(max_blocks):
            raise ValueError(
                f"max_blocks must be a number of thread blocks, an int, or None; got "
                f"{short_repr(max_blocks)}; leave it out for the default"
            )
        reason = self.unavailable_reason(self.devices)
        if reason is not None:
            raise BackendError(f"the backend {self.name!r} cannot be used: {reason}")
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        self._timeout_ns = _nanoseconds(seconds)
        self._calls: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED_CALLS)
        self._num_calls = 0
        self._machine: Machine
        if is_simulated(self.devices):
            self.scratch_bytes = self.simulated_scratch_bytes
            self._machine = simulator.SimulatedGpus(
                len(self.devices), self.scratch_bytes, max_blocks
            )
        else:
            self.scratch_bytes = self.cuda_scratch_bytes
            self._machine = cuda_kernels.CudaDevices(
                self.devices, self.scratch_bytes, self._linked_devices(self.devices), max_blocks
            )
        # Not at exit: the driver may be gone by then, and the exit frees everything.
        weakref.finalize(self, self._machine.close).atexit = False

    @classmethod
    @abstractmethod
    def linked_pairs(cls, num_replicas: int) -> list[tuple[int, int]]:
        """Returns the pairs of replicas where the first must access the second's memory.

        With a pair, its reverse is among them: flags go both ways.
        """

    @classmethod
    def unavailable_reason(cls, devices: Sequence[torch.device | str]) -> str | None:
        devices = parse(devices)
        if len(devices) > MAX_REPLICAS:
            return f"it serves at most {MAX_REPLICAS} replicas"
        if is_simulated(devices):
            return simulator.simulator_missing_reason()
        return cuda_kernels.kernels_missing_reason(cls._linked_devices(devices))

    @classmethod
    def _linked_devices(
        cls, devices: Sequence[torch.device]
    ) -> list[tuple[torch.device, torch.device]]:
        return [(devices[i], devices[j]) for i, j in cls.linked_pairs(len(devices))]

    def prepare(self, reductions: Iterable[tuple[str, torch.dtype]]) -> None:
        # Kernels of a source with the same element type are compiled together.
        calls = [(f"{self.source}_broadcast", torch.uint8, self._arguments("sum"))]
        for op, dtype in reductions:
            calls.append((f"{self.source}_reduce_scatter", dtype, self._arguments(op)))
        self._machine.prepare(calls)

    @contextmanager
    def setting_timeout(self, seconds: float) -> Iterator[None]:
        before, self._timeout_ns = self._timeout_ns, _nanoseconds(seconds)
        try:
            yield
        finally:
            self._timeout_ns = before

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        if cannot_wait_for(lock_of(self).is_over):
            _logger.warning("%r is closed while a collective waits; its tensors are garbage", self)
            self.abort()
        self._machine.close()

    def abort(self) -> None:
        self._machine.abort()

    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum", scale: float = 1.0) -> None:
        self.check_tensors(tensors, op, scale)
        self._launch("all_reduce", tensors, tensors[0].dtype, op=op, scale=scale)

    def reduce_scatter(self, tensors: Sequence[Tensor], op: str = "sum") -> None:
        self.check_tensors(tensors, op)
        self._launch("reduce_scatter", tensors, tensors[0].dtype, op=op)

    def all_gather(self, tensors: Sequence[Tensor]) -> None:
        self.check_tensors(tensors)
        self._launch("all_gather", tensors, torch.uint8)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self.check_tensors(tensors, root=root)
        self._launch("broadcast", tensors, torch.uint8, root=int(root))

    def share(self, collective: str, num_bytes: int) -> int:
        """Returns the bytes of a message that one replica processes: by default a chunk."""
        return -(-num_bytes // len(self.devices))

    def kernel_for(self, collective: str, num_bytes: int, blocks: int) -> str:
        """Returns the name of the kernel for a message size and a number of blocks."""
        return f"{self.source}_{collective}"

    def arrange(self, arguments: KernelArguments) -> None:
        """Sets the order of replicas: by default one island, in replica order."""
        num_replicas = arguments.num_replicas
        arguments.order[:num_replicas] = range(num_replicas)
        arguments.position[:num_replicas] = range(num_replicas)
        arguments.island_size = num_replicas

    def _arguments(self, op: str) -> KernelArguments:
        """Returns arguments with the values that kernels are compiled for: replicas, op."""
        arguments = KernelArguments()
        arguments.num_replicas = len(self.devices)
        arguments.op = OPS.index(op)
        # The minimum and maximum of elements are elements, so rounding them loses nothing.
        arguments.rounds = self.partial_sums == "rounded" or op in ("min", "max")
        self.arrange(arguments)
        return arguments

    def _launch(
        self,
        collective: str,
        tensors: Sequence[Tensor],
        element: torch.dtype,
        *,
        op: str = "sum",
        scale: float = 1.0,
        root: int = 0,
    ) -> None:
        """Runs a kernel over checked tensors.

        Args:
            element: the kernel's element type; uint8 for kernels that only copy.

        Raises:
            CollectiveTimeoutError: a replica waited too long; in this call on simulated devices,
                in an earlier one on GPUs.
        """
        self._raise_timeouts()
        first = tensors[0]
        if first.numel() == 0:
            return
        self._num_calls = (self._num_calls + 1) % _CALL_NUMBERS
        self._calls.append((self._num_calls, f"{collective} of {first.nbytes} bytes"))
        num_replicas = len(tensors)
        arguments = self._arguments(op)
        arguments.data[:num_replicas] = [tensor.data_ptr() for tensor in tensors]
        arguments.count = first.numel()
        arguments.timeout_ns = self._timeout_ns
        arguments.scale = scale
        arguments.root = root
        arguments.element_bytes = first.element_size()
        arguments.call = self._num_calls
        limits = self._machine.block_limits
        _, limit = limits[bisect_left(limits, (first.nbytes,))]
        needed = -(-self.share(collective, first.nbytes) // self._machine.bytes_per_block)
        blocks = max(1, min(needed, limit))
        kernel = self.kernel_for(collective, first.nbytes, blocks)
        self._machine.run(kernel, element, arguments, blocks)
        # Kernels have written raw memory; autograd must know, except for inference tensors.
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])
        if is_simulated(self.devices):
            self._raise_timeouts()

    def _raise_timeouts(self) -> None:
        words = self._machine.error_words()
        if not any(words):
            return
        if ABORTED in words:
            self._machine.reset()
            raise BackendError(
                f"the collectives of {self!r} were aborted, and what was reduced last may be "
                "garbage: make another strategy"
            )
        waits = [(i, word & 0xFF) for i, word in enumerate(words) if word]
        number = next(word >> 8 & 0x7FFFFF for word in words if word)
        call = dict(self._calls).get(number, "an earlier collective")
        self._machine.reset()
        waits_text = ", ".join(f"replica {i} waited for replica {j}" for i, j in waits)
        raise CollectiveTimeoutError(
            f"a collective must end within {self._timeout_ns / 1e9:g} s; {self.name} {call} did "
            f"not: {waits_text}; see what the replicas waited for were doing, or allow more with "
            "timeout_seconds"
        )


def check_partial_sums(partial_sums: str) -> str:
    """Returns the argument, which selects how replicas send partial sums of half types.

    "exact" sends them as float32, and the result is rounded once. "rounded" sends them as
    elements, rounded at every hop, as NCCL and so DDP's ``bf16_compress_hook``; all replicas still
    get the same bits. The same holds for products; minima and maxima are always elements.

    Raises:
        ValueError: the argument has another value.
    """
    if partial_sums not in ("exact", "rounded"):
        raise ValueError(f"partial_sums must be 'exact' or 'rounded'; got {partial_sums!r}")
    return partial_sums


def _nanoseconds(seconds: float) -> int:
    """Returns a timeout in nanoseconds, limited so that it fits into 64 bits."""
    return int(min(seconds, 1e9) * 1e9)


# Up to this size, replicas synchronize once, and each reduces the whole message itself. The limits
# of vLLM and FlashInfer for 8 GPUs with NVLink are near it; mirror has no measurement yet.
ONE_SHOT_MAX_BYTES = 256 * 1024


@register("direct")
class DirectCommunicator(KernelCommunicator):
    """One-shot all-reduce for small messages, two-shot for large ones (csrc/direct.cu).

    Every element is reduced in replica order, so results have the bits of "naive" and do not
    depend on which tensors are reduced together.
    """

    deterministic = True
    source = "direct"
    # Each half has room for a block's part of a one-shot message, and a pack at both ends.
    simulated_scratch_bytes = 2 * (ONE_SHOT_MAX_BYTES // 2 + 1024)
    cuda_scratch_bytes = 2 * (32 * 1024 + 1024)

    @classmethod
    def linked_pairs(cls, num_replicas: int) -> list[tuple[int, int]]:
        return list(permutations(range(num_replicas), 2))

    def share(self, collective: str, num_bytes: int) -> int:
        is_one_shot = collective == "all_reduce" and num_bytes <= ONE_SHOT_MAX_BYTES
        return num_bytes if is_one_shot else super().share(collective, num_bytes)

    def kernel_for(self, collective: str, num_bytes: int, blocks: int) -> str:
        if collective != "all_reduce":
            return super().kernel_for(collective, num_bytes, blocks)
        # A block's part of the packs, of which the first and the last may be incomplete.
        part_bytes = -(-(num_bytes // PACK_BYTES + 2) // blocks) * PACK_BYTES
        fits = num_bytes <= ONE_SHOT_MAX_BYTES and part_bytes <= self.scratch_bytes // 2
        return "direct_one_shot" if fits else "direct_two_shot"


@register("ring")
class RingCommunicator(KernelCommunicator):
    """Reduce-scatter and all-gather around a ring, fused (csrc/ring.cu).

    Chunk ``c`` is reduced in the order ``c + 1, c + 2, ..., c``. So all replicas get the same
    bits, and so does every call with the same tensors. But the chunk of an element, and with it
    the last bit, depends on which tensors are reduced together.

    Bytes per element that each replica sends to its neighbour in an all-reduce, for the reduction
    and for the results:

    ==================================  ===========================  =====  =====  =====
    elements, ``partial_sums``          n replicas                   n = 2  n = 4  n = 8
    ==================================  ===========================  =====  =====  =====
    float32                             (4 (n-1) + 4 (n-1)) / n      4      6      7
    bfloat16 or float16, "exact"        (4 (n-1) - 2 + 2 (n-1)) / n  2      4      5
    the same, "rounded"; min and max    (2 (n-1) + 2 (n-1)) / n      2      3      3.5
    ==================================  ===========================  =====  =====  =====

    The first replica of a sum sends its elements unchanged. From the second replica on, two bytes
    are not enough for a sum that is rounded once, and sending all its terms takes at least four
    bytes as well. If all GPUs can access each other, "direct" sends only two bytes each way.
    """

    source = "ring"
    # Four slots. On GPUs they have 128 KiB: with 32 blocks and three slots in flight some 12 MiB,
    # ten times what a link of 400 GB/s transfers in the 3 us of a round trip. The workspaces of
    # replicas that share the only GPU take 512 KiB for each of its multiprocessors, 66 MiB of an
    # H200; those of one replica per GPU 32 MiB each.
    simulated_scratch_bytes = 4 * 16 * 1024
    cuda_scratch_bytes = 4 * 128 * 1024

    def __init__(
        self,
        devices: Sequence[torch.device | str],
        *,
        timeout_seconds: float | None = None,
        max_blocks: int | None = None,
        partial_sums: str = "exact",
    ) -> None:
        """Allocates the workspaces.

        Args:
            timeout_seconds, max_blocks: as for the other kernels.
            partial_sums: how partial sums of half types are sent, see ``check_partial_sums``.

        Raises:
            ValueError: ``partial_sums`` is unknown.
            BackendError, DeviceError, ValueError: as for the other kernels.
        """
        self.partial_sums = check_partial_sums(partial_sums)
        super().__init__(devices, timeout_seconds=timeout_seconds, max_blocks=max_blocks)

    def share(self, collective: str, num_bytes: int) -> int:
        # A broadcast sends the whole message around the ring.
        return num_bytes if collective == "broadcast" else super().share(collective, num_bytes)

    @classmethod
    def linked_pairs(cls, num_replicas: int) -> list[tuple[int, int]]:
        # Data and flags go forward, credit goes back.
        pairs = [(i, (i + step) % num_replicas) for i in range(num_replicas) for step in (1, -1)]
        return [(i, j) for i, j in pairs if i != j]


@register("hierarchical")
class HierarchicalCommunicator(KernelCommunicator):
    """Reduce-scatter inside islands, all-reduce between them, all-gather (csrc/hierarchical.cu).

    Every element is reduced in replica order inside the islands, and then in island order. So
    results depend on the islands, but not on which tensors are reduced together.

    Inside an island, elements are sent unchanged. Bytes per element that each replica sends to
    other islands in an all-reduce, for the reduction and for the results, with k islands of g
    replicas:

    ==================================  =============================  ============  ============
    elements, ``partial_sums``          k islands of g                 k = 2, g = 2  k = 2, g = 4
    ==================================  =============================  ============  ============
    float32                             (4 (k-1) + 4 (k-1)) / (k g)    2             1
    bfloat16 or float16, "exact"        (4 (k-1) + 2 (k-1)) / (k g)    1.5           0.75
    the same, "rounded"; min and max    (2 (k-1) + 2 (k-1)) / (k g)    1             0.5
    ==================================  =============================  ============  ============

    An island's partial sum takes four bytes in place of g terms of two bytes each.

    Attributes:
        islands: the replicas of each island.
    """

    source = "hierarchical"
    # A slot for the partial sum of each island; see RingCommunicator for the size.
    simulated_scratch_bytes = 64 * 1024
    cuda_scratch_bytes = 512 * 1024

    def __init__(
        self,
        devices: Sequence[torch.device | str],
        *,
        islands: Sequence[Sequence[int]] | None = None,
        timeout_seconds: float | None = None,
        max_blocks: int | None = None,
        partial_sums: str = "exact",
    ) -> None:
        """Allocates the workspaces.

        Args:
            islands: the ids of the replicas in each island, all of equal size; the default
                depends on the devices' links, see ``islands_of``.
            timeout_seconds, max_blocks: as for the other kernels.
            partial_sums: how partial sums of half types are sent, see ``check_partial_sums``.

        Raises:
            ValueError: the islands are not of equal size, or do not have each replica once; or
                ``partial_sums`` is unknown.
            BackendError, DeviceError: as for the other backends.
        """
        self.partial_sums = check_partial_sums(partial_sums)
        super().__init__(devices, timeout_seconds=timeout_seconds, max_blocks=max_blocks)
        given = islands_of(self.devices) if islands is None else islands
        self.islands = check_islands(given, len(self.devices))
        if len(self.islands) == 1:
            self.partial_sums = "exact"  # partial sums are not sent

    @classmethod
    def linked_pairs(cls, num_replicas: int) -> list[tuple[int, int]]:
        # With any islands, some blocks of a replica exchange with each other replica.
        return list(permutations(range(num_replicas), 2))

    def arrange(self, arguments: KernelArguments) -> None:
        order = [replica_id for island in self.islands for replica_id in island]
        arguments.order[: len(order)] = order
        for position, replica_id in enumerate(order):
            arguments.position[replica_id] = position
        arguments.island_size = len(self.islands[0])
