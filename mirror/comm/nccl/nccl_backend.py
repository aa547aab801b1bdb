"""The backend "nccl": NVIDIA's library, called for all GPUs by one thread.

Problem: half types must be summed in float32 and rounded once, but NCCL rounds at every hop. Sent
as float32, they would take twice the bytes.
Rule: NCCL only moves half types. Every replica owns a chunk and receives the other replicas' terms
of it. It sums them in float32, scales and rounds, and sends the result to all:

    n = 3; src->dst:chunk
        0->1:1 0->2:2  1->0:0 1->2:2  2->0:0 2->1:1     all to all, in two bytes
        0: sum of 0    1: sum of 1    2: sum of 2       float32, in registers
        0->1:0 0->2:0  1->0:1 1->2:1  2->0:2 2->1:2     all-gather, in two bytes

Each replica sends 2 (n - 1) / n * 2 bytes per element, as NCCL's ring does for float16.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mirror.comm.collective_lock import cannot_wait_for
from mirror.comm.communicator import (
    DEFAULT_TIMEOUT_SECONDS,
    HALF_DTYPES,
    Communicator,
    writing_in_place,
)
from mirror.comm.host_backends import reduce_in_order
from mirror.comm.nccl import libnccl
from mirror.comm.nccl.clique import Clique
from mirror.comm.nccl.libnccl import (
    Call,
    NcclLibrary,
    all_gather_calls,
    all_reduce_calls,
    broadcast_calls,
    exchange_calls,
    reduce_scatter_calls,
    version_name,
)
from mirror.comm.registry import register
from mirror.devices import are_distinct, is_simulated, parse
from mirror.errors import BackendError
from mirror.values import check_timeout

# An issue of NCCL reports 55 s on 8 B200, mostly for loading kernels (NVIDIA/nccl#1646).
_INIT_SECONDS = 300.0
# Integers that sort like the floats of their size; see _ordered.
_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}
_FLOATS = {key: dtype for dtype, key in _KEYS.items()}


@register("nccl")
class NcclCommunicator(Communicator):
    """One NCCL communicator per GPU; a collective is one group of calls, on the current streams.

    In two cases NCCL would break the contract. It rounds sums of half types at every hop. Its min
    and max drop NaNs, so floats travel as integers in the same order. Sums are scaled
    afterwards, because ncclAvg cannot use the adders of an NVLink switch.

    NCCL or torch decides the order of a sum. All replicas get the same bits, but the bits depend
    on which tensors are reduced together.

    **It has run with one rank on one GPU, and not yet on several GPUs**; a self-test on the same
    devices must pass before its first use.
    """

    waits = True
    needs_trial = True
    concurrent = True  # the clique serializes operations, and NCCL orders them on the devices

    def __init__(
        self,
        devices: Sequence[torch.device | str],
        *,
        timeout_seconds: float | None = None,
        init_seconds: float | None = None,
        library: NcclLibrary | None = None,
    ) -> None:
        """Creates the communicators.

        Args:
            timeout_seconds: the limit of a collective, with the work enqueued before it; the
                default is 600 s. After it all communicators are aborted, and the next call raises.
            init_seconds: the limit of creating the communicators, which loads NCCL's kernels on
                every GPU. The default is ``timeout_seconds``, and at least 300 s.
            library: replaces the process's libnccl; it must work on the memory of ``devices``.

        Raises:
            BackendError: NCCL cannot be used, see ``unavailable_reason``, or fails.
            CollectiveTimeoutError: NCCL is not ready in time.
            DeviceError: a device does not exist.
            ValueError: the timeout is negative.
        """
        super().__init__(devices)
        check_timeout(timeout_seconds)
        if library is None:
            reason = self.unavailable_reason(self.devices)
            if reason is not None:
                raise BackendError(f"the backend 'nccl' cannot be used: {reason}")
            library = libnccl.nccl_library()
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        if init_seconds is None:
            init_seconds = seconds_to_get_ready(seconds)
        self._clique = Clique(library, self.devices, seconds, init_seconds)
        # Not at exit: the driver may be gone by then, and the exit frees everything.
        weakref.finalize(self, self._clique.abandon).atexit = False

    @classmethod
    def unavailable_reason(cls, devices: Sequence[torch.device | str]) -> str | None:
        devices = parse(devices)
        if is_simulated(devices):
            return "NCCL serves GPUs only"
        if len(devices) > 1 and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            return (
                "CUDA_LAUNCH_BLOCKING=1 makes the thread wait for the first GPU, which waits for "
                "the others to be started by that thread; unset it"
            )
        if os.environ.get("NCCL_COMM_BLOCKING") == "1":
            return "NCCL_COMM_BLOCKING=1 makes waits without a timeout; unset it"
        reason = libnccl.nccl_missing_reason()
        if reason is not None or are_distinct(devices):
            return reason
        return shared_gpu_reason(
            libnccl.nccl_library().version, os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE")
        )

    @contextmanager
    def setting_timeout(self, seconds: float) -> Iterator[None]:
        before, self._clique.timeout_seconds = self._clique.timeout_seconds, seconds
        try:
            yield
        finally:
            self._clique.timeout_seconds = before

    def abort(self) -> None:
        self._clique.abort()

    def close(self) -> None:
        """Waits for enqueued collectives, and destroys the communicators.

        Raises:
            BackendError, CollectiveTimeoutError: that failed, or a collective failed and no later
                call has raised its error.
        """
        if not self._closed:
            super().close()
            if cannot_wait_for(self._clique.is_idle):
                self._clique.abort(is_reported=True)
            self._clique.close()

    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum", scale: float = 1.0) -> None:
        self.check_tensors(tensors, op, scale)
        if tensors[0].numel() == 0:
            return
        if tensors[0].dtype in HALF_DTYPES:
            self._reduce_halves("all_reduce", tensors, op, scale)
            if len(tensors) > 1:
                self._run("all_reduce", tensors, all_gather_calls(tensors))
            return
        with writing_in_place(tensors):
            if _nccl_can_reduce(tensors[0], op):
                self._run("all_reduce", tensors, all_reduce_calls(tensors, op))
                if scale != 1:
                    for tensor in tensors:
                        tensor.mul_(scale)
                return
            keys = [_encode_keys(tensor, op) for tensor in tensors]
            self._run("all_reduce", tensors, all_reduce_calls(keys, op))
            for tensor, key in zip(tensors, keys, strict=True):
                value = _decode_keys(key)
                tensor.copy_(value if scale == 1 else value.mul_(scale))

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self.check_tensors(tensors, root=root)
        if tensors[0].numel() == 0:
            return
        self._run("broadcast", tensors, broadcast_calls(tensors, int(root)))

    def reduce_scatter(self, tensors: Sequence[Tensor], op: str = "sum") -> None:
        self.check_tensors(tensors, op)
        if tensors[0].numel() == 0:
            return
        if tensors[0].dtype in HALF_DTYPES:
            self._reduce_halves("reduce_scatter", tensors, op)
            return
        with writing_in_place(tensors):
            if _nccl_can_reduce(tensors[0], op):
                self._run("reduce_scatter", tensors, reduce_scatter_calls(tensors, op))
                return
            keys = [_encode_keys(tensor, op).view(-1) for tensor in tensors]
            self._run("reduce_scatter", tensors, reduce_scatter_calls(keys, op))
            for i, (tensor, key) in enumerate(zip(tensors, keys, strict=True)):
                own = tensor.view(-1).tensor_split(len(tensors))[i]
                own.copy_(_decode_keys(key.tensor_split(len(tensors))[i]))

    def all_gather(self, tensors: Sequence[Tensor]) -> None:
        self.check_tensors(tensors)
        if tensors[0].numel() > 0:
            self._run("all_gather", tensors, all_gather_calls(tensors))

    def _reduce_halves(
        self, collective: str, tensors: Sequence[Tensor], op: str, scale: float = 1.0
    ) -> None:
        """Leaves chunk ``i`` of the reduction in chunk ``i`` of ``tensors[i]``."""
        chunks = [tensor.view(-1).tensor_split(len(tensors)) for tensor in tensors]
        with writing_in_place(tensors):
            # The terms that each owner receives: one row from each replica.
            terms = [
                chunks[i][i].new_empty((len(tensors), chunks[i][i].numel()))
                for i in range(len(tensors))
            ]
            if len(tensors) > 1:
                self._run(collective, tensors, exchange_calls(chunks, terms))
            for i, rows in enumerate(terms):
                own = chunks[i][i]
                rows[i].copy_(own)
                own.copy_(_reduce_rows(rows, op, scale))

    def _run(self, collective: str, tensors: Sequence[Tensor], calls: Sequence[Call]) -> None:
        first = tensors[0]
        dtype = str(first.dtype).removeprefix("torch.")
        self._clique.run(f"{collective} of {first.numel()} {dtype}", calls)
        # NCCL has written raw memory; autograd must know, except for inference tensors.
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def seconds_to_get_ready(timeout_seconds: float) -> float:
    """Returns the limit of creating communicators, from the limit of a collective."""
    return max(timeout_seconds, _INIT_SECONDS)


def shared_gpu_reason(version: int, enabled: str | None) -> str | None:
    """Returns why replicas cannot share a GPU; ``None`` if they can.

    Args:
        version: of NCCL, as a number.
        enabled: the value of NCCL_MULTI_RANK_GPU_ENABLE, or None.
    """
    if version < libnccl.SHARED_GPU:
        return (
            f"several replicas are on one GPU, which NCCL {version_name(version)} refuses, as all "
            "versions before 2.30 do; pass backend='direct'"
        )
    if enabled != "1":
        return (
            "several replicas are on one GPU, which NCCL does with NCCL_MULTI_RANK_GPU_ENABLE=1 "
            "only (experimental); set it, or pass backend='direct'"
        )
    return None


def _reduce_rows(rows: Tensor, op: str, scale: float) -> Tensor:
    """Returns the reduction of rows of a half type, in float32, scaled; a sum is one kernel."""
    if op != "sum":
        return reduce_in_order(rows.unbind(0), op, scale)
    total = rows.sum(0, dtype=torch.float32)
    return total if scale == 1 else total.mul_(scale)


def _nccl_can_reduce(tensor: Tensor, op: str) -> bool:
    """Returns whether NCCL's own reduction keeps the contract, for types other than half types."""
    return op in ("sum", "prod") or not tensor.is_floating_point()


def _encode_keys(tensor: Tensor, op: str) -> Tensor:
    """Returns integers in the order of the floats; NaNs become the value that wins."""
    dtype = _KEYS[tensor.dtype]
    keys = _flip_negatives(tensor.view(dtype))
    limits = torch.iinfo(dtype)
    return keys.masked_fill_(tensor.isnan(), limits.max if op == "max" else limits.min)


def _decode_keys(keys: Tensor) -> Tensor:
    """Returns the floats for integers of ``_encode_keys``."""
    return _flip_negatives(keys).view(_FLOATS[keys.dtype])


def _flip_negatives(bits: Tensor) -> Tensor:
    """Returns integers in the order of floats, from the floats' bits; and the bits from these.

    A float has a sign and a magnitude, and a negative integer has a two's complement. So all bits
    of negative numbers are flipped, except the sign.
    """
    all_bits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (all_bits.bits - 1)) & all_bits.max)
