"""Envelope: what a worker says to the others, as bytes of a number that all of them know.

[Note: Envelopes]
gloo ends the process, beyond any ``except``, when the sizes of two workers' buffers differ, and
NCCL hangs. So before anything travels whose size one worker alone knows, all gather envelopes of
one size, and an envelope tells what is meant: a hash of the operation, its number and its
signature; the user's line, in words; how long the payload is; and the payload itself, where it
fits. If somebody's does not, all know from the lengths, and a second gathering of the longest
length follows. Who is at something else is found before a shape has met another.

    8 bytes   hash of number, operation, signature
    8 bytes   length of the payload
    2 bytes   length of the words
    words     "all_reduce(sum) of float32[3] at train.py:12"
    payload   or nothing, if it is longer than what is left
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

ENVELOPE_BYTES = 1024
_HEAD = struct.Struct("<8sQH")
_MAX_WORDS = 360  # bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """One worker's message.

    Attributes:
        key: of what it is at.
        words: the same, and the user's line.
        length: the payload's, in bytes.
        payload: ``None`` if it was too long for the envelope.
    """

    key: bytes
    words: str
    length: int
    payload: bytes | None

    @classmethod
    def from_payload(cls, key: bytes, words: str, payload: bytes) -> Envelope:
        """Returns the envelope that says this; long words are cut."""
        words = words.encode()[:_MAX_WORDS].decode(errors="ignore")  # of a character cut, nothing
        fits = len(payload) <= ENVELOPE_BYTES - _HEAD.size - len(words.encode())
        return cls(key, words, len(payload), payload if fits else None)

    def to_bytes(self) -> bytearray:
        """Returns it as it is sent: ``ENVELOPE_BYTES`` bytes."""
        words = self.words.encode()
        body = _HEAD.pack(self.key, self.length, len(words)) + words + (self.payload or b"")
        return bytearray(body.ljust(ENVELOPE_BYTES, b"\0"))

    @classmethod
    def from_bytes(cls, sealed: bytes) -> Envelope:
        """Returns what was sealed."""
        key, length, num_words = _HEAD.unpack_from(sealed)
        begin = _HEAD.size + num_words
        fits = begin + length <= ENVELOPE_BYTES
        words = sealed[_HEAD.size : begin].decode(errors="replace")
        return cls(key, words, length, sealed[begin : begin + length] if fits else None)


def fingerprint(number: int, what: str, signature: object) -> bytes:
    """Returns the hash of what a worker is at."""
    return hashlib.blake2b(f"{number} {what} {signature!r}".encode(), digest_size=8).digest()
