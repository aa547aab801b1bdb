"""Checked gathers: workers exchange payloads in envelopes of one size, after a check of the call.

Payloads are encoded without pickle, because received bytes must never run as code.

[Note: Envelopes]
Problem: gloo ends the process when the buffer sizes of two workers differ, and NCCL hangs.
Rule: all workers first gather envelopes of one size; a payload that does not fit follows in a
second gather of the longest length. A worker in another operation is found by the hash.

    8 bytes   hash of number, operation, signature
    8 bytes   length of the payload
    2 bytes   length of the words
    words     "all_reduce(sum) of float32[3] at train.py:12"
    payload   empty if it is longer than the remaining space
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mirror.comm.workers.monitored_wait import line_per_worker
from mirror.comm.workers.worker_group import Message, move_to_host
from mirror.errors import DivergenceError

_LENGTH = struct.Struct("<I")


def serialize(tensors: Sequence[Tensor], numbers: Sequence[float]) -> bytes:
    """Returns tensors and numbers as a header in JSON and the tensors' bytes."""
    dense = move_to_host([tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors])
    described = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in dense]
    exact = [float(number).hex() for number in numbers]  # also for NaN and infinity
    header = json.dumps([described, exact]).encode()
    raw = [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in dense if t.numel()]
    return b"".join([_LENGTH.pack(len(header)), header, *raw])


def deserialize(data: bytes) -> Message:
    """Returns the message that ``serialize`` encoded."""
    (length,) = _LENGTH.unpack_from(data)
    described, numbers = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    begin = _LENGTH.size + length
    tensors = []
    for name, shape in described:
        dtype: torch.dtype = getattr(torch, name)
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            raw = bytearray(data[begin : begin + tensor.nbytes])
            tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape)
            begin += tensor.nbytes
        tensors.append(tensor)
    return Message(tensors, tuple(map(float.fromhex, numbers)))


ENVELOPE_BYTES = 1024
_HEAD = struct.Struct("<8sQH")
_MAX_WORDS = 360  # bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """One worker's message.

    Attributes:
        key: the fingerprint of the operation.
        words: the operation and the user's line, for messages.
        length: of the payload, in bytes.
        payload: None if it is too long for the envelope.
    """

    key: bytes
    words: str
    length: int
    payload: bytes | None

    @classmethod
    def from_payload(cls, key: bytes, words: str, payload: bytes) -> Envelope:
        """Returns the envelope for a payload; long words are cut."""
        # A character that the limit cuts is dropped.
        words = words.encode()[:_MAX_WORDS].decode(errors="ignore")
        fits = len(payload) <= ENVELOPE_BYTES - _HEAD.size - len(words.encode())
        return cls(key, words, len(payload), payload if fits else None)

    def to_bytes(self) -> bytearray:
        """Returns the ``ENVELOPE_BYTES`` bytes to send."""
        words = self.words.encode()
        body = _HEAD.pack(self.key, self.length, len(words)) + words + (self.payload or b"")
        return bytearray(body.ljust(ENVELOPE_BYTES, b"\0"))

    @classmethod
    def from_bytes(cls, data: bytes) -> Envelope:
        """Returns the envelope that ``to_bytes`` encoded."""
        key, length, num_words = _HEAD.unpack_from(data)
        begin = _HEAD.size + num_words
        fits = begin + length <= ENVELOPE_BYTES
        words = data[_HEAD.size : begin].decode(errors="replace")
        return cls(key, words, length, data[begin : begin + length] if fits else None)


def hash_operation(number: int, what: str, signature: object) -> bytes:
    """Returns the hash of an operation: its number in the group, its name, its signature."""
    return hashlib.blake2b(f"{number} {what} {signature!r}".encode(), digest_size=8).digest()


_MAX_SIGNATURE = 120  # characters

# Starts an operation of a process group, described in words, and waits until it is done.
Run = Callable[[str, Callable[[Any], dist.Work]], None]


class CheckedGather:
    """Exchanges payloads over one process group; see [Note: Envelopes].

    Args:
        where: returns the user's line.
        size: the number of workers.
    """

    def __init__(self, run: Run, where: Callable[[], str], size: int) -> None:
        self._run, self._where, self._size = run, where, size
        self._num_exchanges = 0

    def exchange(self, what: str, signature: object, payload: bytes) -> list[bytes]:
        """Returns the payloads of all workers, by rank.

        Raises:
            DivergenceError: another worker is in another operation, or has another signature.
        """
        self._num_exchanges += 1
        words = f"{what}{_signature_text(signature, what)} at {self._where()}"
        envelope = Envelope.from_payload(
            hash_operation(self._num_exchanges, what, signature), words, payload
        )
        envelopes = list(map(Envelope.from_bytes, self._gather(envelope.to_bytes(), words)))
        if any(one.key != envelope.key for one in envelopes):
            raise DivergenceError(
                "all workers must reach the same operations in the same order, with the same "
                "shapes; they did not:\n" + line_per_worker([one.words for one in envelopes])
            )
        if all(one.payload is not None for one in envelopes):
            return [one.payload or b"" for one in envelopes]
        longest = max(one.length for one in envelopes)
        whole = self._gather(bytearray(payload.ljust(longest, b"\0")), words)
        return [raw[: one.length] for raw, one in zip(whole, envelopes, strict=True)]

    def broadcast(self, what: str, raw: Tensor) -> None:
        """Broadcasts worker 0's bytes into a tensor of the same size on all workers."""
        self._run(f"{what} at {self._where()}", lambda group: group.broadcast(raw, 0))

    def _gather(self, raw: bytearray, words: str) -> list[bytes]:
        """Returns the bytes of all workers, which have the same number."""
        own = torch.frombuffer(raw, dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        self._run(words, lambda group: group.allgather([gathered], [own]))
        return [each.numpy().tobytes() for each in gathered]


def _signature_text(signature: object, what: str) -> str:
    """Returns " of SIGNATURE", or "" if the operation's name has it already."""
    if signature is None or isinstance(signature, str) or " of " in what:
        return ""
    words = repr(signature)
    return f" of {words if len(words) <= _MAX_SIGNATURE else words[: _MAX_SIGNATURE - 3] + '...'}"
