"""protobuf_wire.py: numbers and fields of protocol buffers, right and malformed."""

import numpy as np
import pytest

from mirror.data.tfrecord.protobuf_wire import (
    DELIMITED,
    FIXED32,
    FIXED64,
    SHORT_BYTES,
    VARINT,
    encode_packed_int64,
    encode_varint,
    fields,
    packed_int64,
    varint,
)
from mirror.errors import RecordError

# A number and its encoding, from the specification's rule: seven bits a byte, lowest first.
KNOWN = {
    0: "00",
    1: "01",
    127: "7f",
    128: "8001",
    150: "9601",
    2**63 - 1: "ff" * 8 + "7f",
    -1: "ff" * 9 + "01",
    -(2**63): "80" * 9 + "01",
}
START_1, END_1, START_2, END_2 = b"\x0b", b"\x0c", b"\x13", b"\x14"


@pytest.mark.parametrize("repeats", [1, SHORT_BYTES])  # the short and the long way
@pytest.mark.parametrize(("number", "encoded"), KNOWN.items())
def test_numbers_are_encoded_as_specified(number, encoded, repeats):
    data = bytes.fromhex(encoded) * repeats
    numbers = np.full(repeats, number, np.int64)
    assert encode_packed_int64(numbers) == data
    assert packed_int64(data, 0, len(data)).tolist() == numbers.tolist()
    assert encode_varint(number % 2**64) == bytes.fromhex(encoded)
    assert varint(data, 0, len(data)) == (number % 2**64, len(data) // repeats)


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_numbers_of_all_lengths_come_back(count):
    shifts = np.arange(count) % 64
    numbers = (np.int64(1) << shifts) * np.where(np.arange(count) % 2, -1, 1)
    data = encode_packed_int64(numbers)
    assert np.array_equal(packed_int64(b"?" + data + b"?", 1, 1 + len(data)), numbers)
    assert packed_int64(data, 0, len(data)).dtype == np.int64


@pytest.mark.parametrize("before", [0, SHORT_BYTES])
@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x80", "ends inside"),
        (b"\xff" * 9, "ends inside"),
        (b"\xff" * 10 + b"\x01", "more than 10 bytes"),
    ],
)
def test_a_malformed_number_is_refused_with_its_position(data, what, before):
    whole = b"\x01" * before + data
    with pytest.raises(RecordError, match=f"byte {before} of the record.*{what}"):
        packed_int64(whole, 0, len(whole))


def test_bits_beyond_64_are_dropped_as_by_protobuf():
    data = b"\xff" * 9 + b"\x7f"
    assert varint(data, 0, 10) == (2**64 - 1, 10)
    assert packed_int64(data * 4, 0, 40).tolist() == [-1] * 4


def test_fields_of_every_wire_type_are_bounded():
    data = b"\x08\x96\x01" + b"\x11" + b"8" * 8 + b"\x1a\x02hi" + b"\x25" + b"4" * 4
    assert list(fields(data, 0, len(data))) == [
        (1, VARINT, 1, 3),
        (2, FIXED64, 4, 12),
        (3, DELIMITED, 14, 16),
        (4, FIXED32, 17, 21),
    ]


def test_groups_are_passed_over_whole():
    group = START_1 + b"\x10\x05" + START_2 + b"\x1a\x01\x0c" + END_2 + END_1
    found = [(number, begin, end) for number, _, begin, end in fields(group + b"\x18\x07", 0, 11)]
    assert found == [(1, 1, 9), (3, 10, 11)]


@pytest.mark.parametrize(
    ("data", "position", "what"),
    [
        (b"\x08", 1, "ends inside"),
        (b"\x00\x01", 0, "cannot have the number 0"),
        (b"\x80\x80\x80\x80\x10\x01", 0, "cannot have the number 536870912"),
        (b"\x08\x01\x0e", 3, "no such wire type"),
        (b"\x1a\x05hi", 1, "5 bytes, but its message has 2 left"),
        (b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01hi", 1, "but its message has 2 left"),
        (b"\x11" + b"8" * 7, 1, "8 bytes, but its message has 7 left"),
        (b"\x25444", 1, "4 bytes, but its message has 3 left"),
        (END_1, 1, "a group ends that did not begin"),
        (START_1 + b"\x10\x05", 3, "group 1 does not end"),
        (START_1 + START_2 + END_1, 2, "group 1 ends, which is not the one"),
    ],
)
def test_a_malformed_field_is_refused_with_its_position(data, position, what):
    with pytest.raises(RecordError, match=f"byte {position} of the record: .*{what}"):
        list(fields(data, 0, len(data)))


def test_deep_groups_need_no_deep_stack():
    data = START_1 * 100_000 + END_1 * 100_000
    assert next(fields(data, 0, len(data)))[3] == len(data)
