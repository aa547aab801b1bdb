"""The wire format of protocol buffers: fields, varints and packed numbers.

Specification: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mirror.errors import RecordError

VARINT, FIXED64, DELIMITED, GROUP_START, GROUP_END, FIXED32 = range(6)
VARINT_BYTES = 10
# Up to this many bytes a loop in Python is faster than a dozen calls of NumPy.
SHORT_BYTES = 32


def fields(data: bytes, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields the fields of the message in ``data[begin:end]``, also unknown ones and groups.

    Yields:
        ``(number, wire type, begin, end)``, where ``data[begin:end]`` is the payload without tag
        and length.

    Raises:
        RecordError: the bytes are not a message.
    """
    while begin < end:
        number, wire_type, payload = _tag(data, begin, end)
        if wire_type == GROUP_START:
            start, stop = payload, _end_of_group(data, begin, end)
        else:
            start, stop = _payload(data, payload, end, wire_type)
        yield number, wire_type, start, stop
        begin = stop


def varint(data: bytes, begin: int, end: int) -> tuple[int, int]:
    """Returns the unsigned 64-bit number that begins at ``begin``, and the position of its end.

    Raises:
        RecordError: the number continues beyond ``end``, or has more than 10 bytes.
    """
    if begin < end and data[begin] < 0x80:  # the usual case
        return data[begin], begin + 1
    value = 0
    for i in range(begin, min(end, begin + VARINT_BYTES)):
        byte = data[i]
        value |= (byte & 0x7F) << 7 * (i - begin)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, i + 1
    what = "ends inside its message" if end - begin < VARINT_BYTES else "has more than 10 bytes"
    raise malformed(begin, f"a number {what}")


def packed_int64(data: bytes, begin: int, end: int) -> NDArray[np.int64]:
    """Returns the consecutive numbers in ``data[begin:end]``, in two's complement.

    Raises:
        RecordError: the last number is cut off, or a number has more than 10 bytes.
    """
    if end - begin <= SHORT_BYTES:
        numbers = []
        while begin < end:
            number, begin = varint(data, begin, end)
            numbers.append(number)
        return np.array(numbers, np.uint64).view(np.int64)
    encoded = np.frombuffer(data, np.uint8, end - begin, begin)
    last = np.flatnonzero(encoded < 0x80)
    first = np.concatenate(([0], last[:-1] + 1)) if last.size else np.zeros(1, np.int64)
    if not last.size or last[-1] != encoded.size - 1:
        cut = 0 if not last.size else int(last[-1]) + 1
        raise malformed(begin + cut, "a number ends inside its message")
    num_bytes = last - first + 1
    if num_bytes.max() > VARINT_BYTES:
        position = begin + int(first[np.argmax(num_bytes > VARINT_BYTES)])
        raise malformed(position, "a number has more than 10 bytes")
    values = (encoded[first] & 0x7F).astype(np.uint64)
    for i in range(1, num_bytes.max()):
        longer = np.flatnonzero(num_bytes > i)
        septets = (encoded[first[longer] + i] & 0x7F).astype(np.uint64)
        values[longer] |= septets << np.uint64(7 * i)
    return values.view(np.int64)


def encode_varint(value: int) -> bytes:
    """Encodes a number from 0 to 2**64 - 1."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_packed_int64(values: NDArray[np.int64]) -> bytes:
    """Encodes consecutive numbers; negative ones have 10 bytes."""
    unsigned = values.view(np.uint64)
    if unsigned.size <= SHORT_BYTES:
        return b"".join(encode_varint(value) for value in unsigned.tolist())
    num_bytes = np.ones(unsigned.size, np.int64)
    for i in range(1, VARINT_BYTES):
        num_bytes += unsigned >= np.uint64(1 << 7 * i)
    end = np.cumsum(num_bytes)
    encoded = np.empty(end[-1], np.uint8)
    for i in range(num_bytes.max()):
        longer = np.flatnonzero(num_bytes > i)
        septets = (unsigned[longer] >> np.uint64(7 * i)).astype(np.uint8) & 0x7F
        more = (num_bytes[longer] > i + 1).astype(np.uint8) << 7
        encoded[end[longer] - num_bytes[longer] + i] = septets | more
    return encoded.tobytes()


def encode_delimited(number: int, payload: bytes) -> bytes:
    """Encodes a field of bytes, a string, a message or packed numbers."""
    return encode_varint(number << 3 | DELIMITED) + encode_varint(len(payload)) + payload


def malformed(position: int, what: str) -> RecordError:
    """Returns the error for bytes that are no valid message."""
    return RecordError(
        f"malformed protocol buffer, byte {position} of the record: {what}; is this the record of "
        "another format?"
    )


def _tag(data: bytes, begin: int, end: int) -> tuple[int, int, int]:
    tag, payload = varint(data, begin, end)
    if not 0 < tag >> 3 < 2**29:
        raise malformed(begin, f"a field cannot have the number {tag >> 3}")
    return tag >> 3, tag & 7, payload


def _payload(data: bytes, begin: int, end: int, wire_type: int) -> tuple[int, int]:
    """Returns the bounds of the payload of a field that is no group."""
    if wire_type == VARINT:
        return begin, varint(data, begin, end)[1]
    if wire_type == DELIMITED:
        size, start = varint(data, begin, end)
    elif wire_type in (FIXED64, FIXED32):
        size, start = 8 if wire_type == FIXED64 else 4, begin
    else:
        what = "a group ends that did not begin" if wire_type == GROUP_END else "no such wire type"
        raise malformed(begin, f"{what} ({wire_type})")
    if size > end - start:
        raise malformed(begin, f"a field of {size} bytes, but its message has {end - start} left")
    return start, start + size


def _end_of_group(data: bytes, begin: int, end: int) -> int:
    opened: list[int] = []
    while True:
        if begin >= end:
            raise malformed(begin, f"group {opened[-1]} does not end")
        position = begin
        number, wire_type, begin = _tag(data, begin, end)
        if wire_type == GROUP_START:
            opened.append(number)
        elif wire_type != GROUP_END:
            begin = _payload(data, begin, end, wire_type)[1]
        elif opened.pop() != number:
            raise malformed(position, f"group {number} ends, which is not the one that is open")
        if not opened:
            return begin
