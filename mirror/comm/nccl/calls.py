"""The NCCL calls of each collective, for all replicas, as one group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mirror.comm.nccl.libnccl import DTYPES, OPS

Call = tuple[int, str, tuple[int, ...]]
"""Replica, function, and its arguments without the last two, communicator and stream."""

_BYTES = DTYPES[torch.uint8]
_JOINT = frozenset({"ncclAllReduce", "ncclAllGather", "ncclReduceScatter"})


def are_joint(calls: Sequence[Call], num_replicas: int) -> bool:
    """Returns whether no replica's part can end before all other parts have started.

    A broadcast's part can: the root is done when it has sent. An exchange of chunks can if one of
    them is empty.
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
    """Returns calls that send each replica the other replicas' terms of the chunk that it owns.

    Args:
        chunks: ``chunks[i][j]`` is replica ``i``'s term of the chunk of replica ``j``.
        terms: ``terms[j][i]`` receives it.
    """
    calls: list[Call] = []
    for i, row in enumerate(terms):
        begin, num_bytes = row.data_ptr(), row[0].nbytes  # of each term
        for peer in range(len(chunks)):
            if peer == i:
                continue
            sent = chunks[i][peer]
            if sent.numel() > 0:
                calls.append((i, "ncclSend", (sent.data_ptr(), sent.nbytes, _BYTES, peer)))
            if num_bytes > 0:
                target = begin + peer * num_bytes
                calls.append((i, "ncclRecv", (target, num_bytes, _BYTES, peer)))
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
    """Returns the begin and length of each chunk of ``torch.tensor_split``, in elements."""
    counts = [numel // n + (i < numel % n) for i in range(n)]
    return list(zip(accumulate(counts, initial=0), counts, strict=False))
