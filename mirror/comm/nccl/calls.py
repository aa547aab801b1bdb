"""Calls: what NCCL is asked to do for each replica in one collective, as one group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mirror.comm.nccl.libnccl import DTYPES, OPS

Call = tuple[int, str, tuple[int, ...]]
"""Replica, function, and its arguments but for the last two: the communicator and the stream."""

_BYTES = DTYPES[torch.uint8]
_JOINT = frozenset({"ncclAllReduce", "ncclAllGather", "ncclReduceScatter"})


def are_joint(calls: Sequence[Call], num_replicas: int) -> bool:
    """Whether no replica's part can end before all the others' have begun.

    A broadcast's can: its root is done when it has sent; so can a chunk's that is empty somewhere.
    """
    function = calls[0][1]
    if function == "ncclSend":  # all to all
        return len(calls) == 2 * num_replicas * (num_replicas - 1)
    return function in _JOINT


def all_reduce_calls(wires: Sequence[Tensor], op: str) -> list[Call]:
    count, dtype, number = wires[0].numel(), DTYPES[wires[0].dtype], OPS[op]
    pointers = [wire.data_ptr() for wire in wires]
    return [
        (i, "ncclAllReduce", (pointer, pointer, count, dtype, number))
        for i, pointer in enumerate(pointers)
    ]


def broadcast_calls(tensors: Sequence[Tensor], root: int) -> list[Call]:
    num_bytes = tensors[0].nbytes
    pointers = [tensor.data_ptr() for tensor in tensors]
    return [
        (i, "ncclBroadcast", (pointer, pointer, num_bytes, _BYTES, root))
        for i, pointer in enumerate(pointers)
    ]


def reduce_scatter_calls(wires: Sequence[Tensor], op: str) -> list[Call]:
    n, first, number = len(wires), wires[0], OPS[op]
    dtype, size = DTYPES[first.dtype], first.element_size()
    pointers = [wire.data_ptr() for wire in wires]
    if first.numel() % n == 0:
        count = first.numel() // n
        return [
            (i, "ncclReduceScatter", (pointer, pointer + i * count * size, count, dtype, number))
            for i, pointer in enumerate(pointers)
        ]
    calls: list[Call] = []
    for root, (begin, count) in enumerate(_chunks(first.numel(), n)):
        for i, pointer in enumerate(pointers):
            chunk = pointer + begin * size
            if count > 0:
                calls.append((i, "ncclReduce", (chunk, chunk, count, dtype, number, root)))
    return calls


def exchange_calls(chunks: Sequence[Sequence[Tensor]], terms: Sequence[Tensor]) -> list[Call]:
    """Every replica sends every other one the chunk that this one owns, into its own row there."""
    calls: list[Call] = []
    for i, row in enumerate(terms):
        begin, num_bytes = row.data_ptr(), row[0].nbytes  # of each of its parts
        for peer in range(len(chunks)):
            if peer == i:
                continue
            sent = chunks[i][peer]
            if sent.numel() > 0:
                calls.append((i, "ncclSend", (sent.data_ptr(), sent.nbytes, _BYTES, peer)))
            if num_bytes > 0:
                place = begin + peer * num_bytes
                calls.append((i, "ncclRecv", (place, num_bytes, _BYTES, peer)))
    return calls


def all_gather_calls(tensors: Sequence[Tensor]) -> list[Call]:
    n, numel, size = len(tensors), tensors[0].numel(), tensors[0].element_size()
    pointers = [tensor.data_ptr() for tensor in tensors]
    if numel % n == 0:
        count = numel // n * size
        return [
            (i, "ncclAllGather", (pointer + i * count, pointer, count, _BYTES))
            for i, pointer in enumerate(pointers)
        ]
    calls: list[Call] = []
    for root, (begin, count) in enumerate(_chunks(numel, n)):
        for i, pointer in enumerate(pointers):
            chunk = pointer + begin * size
            if count > 0:
                calls.append((i, "ncclBroadcast", (chunk, chunk, count * size, _BYTES, root)))
    return calls


def _chunks(numel: int, n: int) -> list[tuple[int, int]]:
    """Returns begin and length of each chunk, as ``torch.tensor_split`` cuts."""
    counts = [numel // n + (i < numel % n) for i in range(n)]
    return list(zip(accumulate(counts, initial=0), counts, strict=False))
