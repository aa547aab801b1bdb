"""Converts tf.train.Example, the usual record of a TFRecord file, to and from NumPy arrays.

Schema: tensorflow/core/example/example.proto and feature.proto

    Example          { Features features = 1 }
    SequenceExample  { Features context = 1;  FeatureLists feature_lists = 2 }
    Features         { map<string, Feature> feature = 1 }
    FeatureLists     { map<string, FeatureList> feature_list = 1 }
    FeatureList      { repeated Feature feature = 1 }
    Feature          { oneof: BytesList = 1, FloatList = 2, Int64List = 3 }
    ...List          { repeated ... value = 1 }       numbers packed or not

The wire format of protocol buffers has fields, varints and packed numbers:
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

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
    raise malformed_error(begin, f"a number {what}")


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
        raise malformed_error(begin + cut, "a number ends inside its message")
    num_bytes = last - first + 1
    if num_bytes.max() > VARINT_BYTES:
        position = begin + int(first[np.argmax(num_bytes > VARINT_BYTES)])
        raise malformed_error(position, "a number has more than 10 bytes")
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


def malformed_error(position: int, what: str) -> RecordError:
    """Returns the error for bytes that are no valid message."""
    return RecordError(
        f"malformed protocol buffer, byte {position} of the record: {what}; is this the record of "
        "another format?"
    )


def _tag(data: bytes, begin: int, end: int) -> tuple[int, int, int]:
    tag, payload = varint(data, begin, end)
    if not 0 < tag >> 3 < 2**29:
        raise malformed_error(begin, f"a field cannot have the number {tag >> 3}")
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
        raise malformed_error(begin, f"{what} ({wire_type})")
    if size > end - start:
        raise malformed_error(
            begin, f"a field of {size} bytes, but its message has {end - start} left"
        )
    return start, start + size


def _end_of_group(data: bytes, begin: int, end: int) -> int:
    opened: list[int] = []
    while True:
        if begin >= end:
            raise malformed_error(begin, f"group {opened[-1]} does not end")
        position = begin
        number, wire_type, begin = _tag(data, begin, end)
        if wire_type == GROUP_START:
            opened.append(number)
        elif wire_type != GROUP_END:
            begin = _payload(data, begin, end, wire_type)[1]
        elif opened.pop() != number:
            raise malformed_error(
                position, f"group {number} ends, which is not the one that is open"
            )
        if not opened:
            return begin


Array = NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class FixedLenFeature:
    """A feature with the same number of values in every example, as ``tf.io.FixedLenFeature``.

    Attributes:
        shape: the shape of the values; ``()`` for a single value.
        dtype: ``numpy.float32``, ``numpy.int64``, or ``bytes`` (arrays of dtype ``object``).
        default_value: replaces a missing feature, broadcast to ``shape``; ``None`` makes the
            feature required.

    Raises:
        TypeError, ValueError: the shape or dtype is invalid, or the default value does not fit.
    """

    shape: Sequence[int]
    dtype: DTypeLike
    default_value: ArrayLike | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.shape, Iterable):
            raise TypeError(
                "the shape of a FixedLenFeature is a sequence of integers, () for a single "
                f"value; got {self.shape!r}"
            )
        shape = tuple(operator.index(size) for size in self.shape)
        if any(size < 0 for size in shape):
            raise ValueError(
                f"the sizes of a FixedLenFeature are 0 or more; got {shape}; for a number of "
                "values that varies use VarLenFeature"
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", _feature_dtype(self.dtype))
        if self.default_value is not None:
            default = _as_default(self.default_value, np.dtype(self.dtype))
            object.__setattr__(self, "default_value", np.broadcast_to(default, shape))

    def convert(self, name: str, values: Array | None) -> Array:
        """Returns the feature's flat values in its shape.

        Args:
            name: for errors.
            values: 1-d; ``None`` where the example has no such feature.

        Raises:
            RecordError: it is required and missing, or has another dtype or number of values.
        """
        shape = tuple(self.shape)
        if values is None:
            if self.default_value is None:
                raise RecordError(
                    f"feature {name!r} is required, and the example has none; give its "
                    "FixedLenFeature a default_value, or use VarLenFeature"
                )
            return np.array(self.default_value)
        _check_dtype(name, values, np.dtype(self.dtype))
        if values.size != np.prod(shape, dtype=np.int64):
            raise RecordError(
                f"feature {name!r} has {values.size} values, which do not fill the shape {shape}; "
                "for a number of values that varies use VarLenFeature"
            )
        return values.reshape(shape)


@dataclass(frozen=True)
class VarLenFeature:
    """A feature with any number of values, also none, as a 1-d array.

    Attributes:
        dtype: ``numpy.float32``, ``numpy.int64``, or ``bytes`` (arrays of dtype ``object``).
    """

    dtype: DTypeLike

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _feature_dtype(self.dtype))

    def convert(self, name: str, values: Array | None) -> Array:
        """Returns the values; an empty array if the example has no such feature.

        Raises:
            RecordError: the values have another dtype.
        """
        if values is None:
            return np.empty(0, self.dtype)
        _check_dtype(name, values, np.dtype(self.dtype))
        return values


def _feature_dtype(dtype: DTypeLike) -> np.dtype[np.generic]:
    rule = "a feature holds numpy.float32, numpy.int64 or bytes, for any values written to it"
    try:
        found = np.dtype(dtype)
    except TypeError:  # a dtype of torch, or an unknown name
        raise TypeError(f"{rule}; got {dtype!r}") from None
    if found.kind in "SO":
        return np.dtype(object)
    if found not in (np.float32, np.int64):
        raise ValueError(f"{rule}; got {found}; convert the parsed array with astype")
    return found


def _as_default(value: ArrayLike, dtype: np.dtype[np.generic]) -> Array:
    if dtype.kind != "O":
        return np.asarray(value).astype(dtype, casting="same_kind")
    default = np.asarray(value, object)
    if not all(isinstance(item, bytes) for item in default.flat):
        raise TypeError(f"the default_value of a feature of bytes is bytes; got {value!r}")
    return default


def _check_dtype(name: str, values: Array, dtype: np.dtype[np.generic]) -> None:
    if values.dtype != dtype:
        kinds = {np.dtype(object): "bytes"}
        raise RecordError(
            f"feature {name!r} holds {kinds.get(values.dtype, values.dtype)}, not "
            f"{kinds.get(dtype, dtype)}"
        )


BYTES, FLOAT, INT64 = 1, 2, 3  # numbers of the fields in Feature
# The pieces of a message in the record; together they are one message.
Spans = list[tuple[int, int]]


def parse_example(
    data: bytes, features: Mapping[str, FixedLenFeature | VarLenFeature] | None = None
) -> dict[str, Array]:
    """Parses a serialized ``tf.train.Example``, as ``tf.io.parse_single_example`` does.

    Args:
        data: the record.
        features: the features to parse, by name; other features of the example are skipped.
            ``None`` parses all of them, each with all its values.

    Returns:
        An array for every feature: float32, int64, or of dtype object for ``bytes``. It is 1-d
        unless the feature is a ``FixedLenFeature``. An empty feature without a type counts as
        missing, since some writers write missing ones so; without ``features`` it is an empty
        array of dtype object. The arrays do not alias ``data``.

    Raises:
        RecordError: the bytes are no such message, or a feature does not fit ``features``.
    """
    data = _as_bytes(data)
    spans = _map(data, _messages(data, [(0, len(data))], 1))
    if features is None:
        return {name: _all_values(data, value) for name, value in spans.items()}
    return {
        name: feature.convert(name, _values(data, spans[name]) if name in spans else None)
        for name, feature in features.items()
    }


def parse_sequence_example(data: bytes) -> tuple[dict[str, Array], dict[str, list[Array]]]:
    """Parses a serialized ``tf.train.SequenceExample``.

    Returns:
        The context, as for an example, and the feature lists: by name, a list with an array for
        each step.

    Raises:
        RecordError: the bytes are no such message.
    """
    data = _as_bytes(data)
    whole = [(0, len(data))]
    context = _map(data, _messages(data, whole, 1))
    lists = _map(data, _messages(data, whole, 2))
    return (
        {name: _all_values(data, value) for name, value in context.items()},
        {
            name: [_all_values(data, [step]) for step in _messages(data, steps, 1)]
            for name, steps in lists.items()
        },
    )


def serialize_example(
    features: Mapping[str, ArrayLike | bytes | str | Iterable[bytes | str]],
) -> bytes:
    """Serializes a ``tf.train.Example``; features are written in the order of their names.

    Args:
        features: by name, a number, ``bytes`` or string, or an array or sequence of them.
            Floating values are written as float32, integers and booleans as int64, strings as
            UTF-8. Arrays are written flat, in C order; the format keeps no shapes.

    Raises:
        TypeError: a value has another type.
        ValueError: an integer is outside the range of int64.
    """
    written = []
    for name in sorted(features):
        if not isinstance(name, str):
            raise TypeError(f"features have strings as names; got {name!r}")
        entry = encode_delimited(1, name.encode()) + encode_delimited(
            2, _encode_feature(name, features[name])
        )
        written.append(encode_delimited(1, entry))
    return encode_delimited(1, b"".join(written))


def _as_bytes(data: object) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"a record is bytes; got a {type(data).__name__}")
    return bytes(data)


def _messages(data: bytes, spans: Spans, number: int) -> Spans:
    """Returns the spans of the length-delimited fields ``number`` of a message."""
    return [
        (begin, end)
        for span in spans
        for found, wire_type, begin, end in fields(data, *span)
        if found == number and wire_type == DELIMITED
    ]


def _map(data: bytes, spans: Spans) -> dict[str, Spans]:
    """Returns the values of a map by key; the last of equal keys counts."""
    found: dict[str, Spans] = {}
    for begin, end in _messages(data, spans, 1):
        name, value = "", []
        for number, wire_type, start, stop in fields(data, begin, end):
            if wire_type == DELIMITED and number == 1:
                try:
                    name = data[start:stop].decode()
                except UnicodeDecodeError as error:
                    raise malformed_error(start, "the name of a feature is not UTF-8") from error
            elif wire_type == DELIMITED and number == 2:
                value.append((start, stop))
        found[name] = value
    return found


def _all_values(data: bytes, spans: Spans) -> Array:
    values = _values(data, spans)
    return np.empty(0, object) if values is None else values


def _values(data: bytes, spans: Spans) -> Array | None:
    """Returns the values of a Feature; ``None`` if none of the three lists is set."""
    kind = 0
    lists: Spans = []
    for span in spans:
        for number, wire_type, begin, end in fields(data, *span):
            if number in (BYTES, FLOAT, INT64) and wire_type == DELIMITED:
                if number != kind:  # the last member of a oneof counts
                    kind, lists = number, []
                lists.append((begin, end))
    if kind == 0:
        return None
    if kind == BYTES:
        values = [data[begin:end] for begin, end in _messages(data, lists, 1)]
        array = np.empty(len(values), object)
        array[:] = values
        return array
    pieces = list((_floats if kind == FLOAT else _integers)(data, lists))
    if len(pieces) == 1:
        return pieces[0]
    empty = np.empty(0, np.float32 if kind == FLOAT else np.int64)
    return np.concatenate([empty, *pieces])


def _floats(data: bytes, lists: Spans) -> Iterator[Array]:
    for span in lists:
        for number, wire_type, begin, end in fields(data, *span):
            if number == 1 and wire_type in (DELIMITED, FIXED32):
                count, rest = divmod(end - begin, 4)
                if rest:
                    raise malformed_error(begin, f"{end - begin} bytes are no array of float32")
                yield np.frombuffer(data, "<f4", count, begin).astype(np.float32)


def _integers(data: bytes, lists: Spans) -> Iterator[Array]:
    for span in lists:
        for number, wire_type, begin, end in fields(data, *span):
            if number == 1 and wire_type in (DELIMITED, VARINT):
                yield packed_int64(data, begin, end)


def _encode_feature(name: str, values: object) -> bytes:
    array = _flatten(name, values)
    if array.dtype == object:
        encoded = b"".join(encode_delimited(1, value) for value in array.tolist())
        return encode_delimited(BYTES, encoded)
    if array.dtype == np.float32:
        kind, packed = FLOAT, array.astype("<f4").tobytes()
    else:
        kind, packed = INT64, encode_packed_int64(array.astype(np.int64))
    return encode_delimited(kind, encode_delimited(1, packed) if packed else b"")


def _flatten(name: str, values: object) -> Array:
    """Returns the caller's values as a 1-d array of float32, int64 or, for bytes, object."""
    # Never as NumPy's own strings, which lose zero bytes at the end.
    if isinstance(values, (bytes, str)):
        values = [values]
    array = np.asarray(values)
    if array.dtype.kind in "SUO":
        items = np.asarray(values, object).flatten()
        for i, item in enumerate(items):
            if isinstance(item, str):
                items[i] = item.encode()
            elif isinstance(item, int) and array.dtype == object:
                raise ValueError(f"feature {name!r}: {item} is not in the range of int64")
            elif not isinstance(item, bytes):
                raise TypeError(
                    f"feature {name!r}: values are all numbers or all bytes and strings; got a "
                    f"{type(item).__name__}"
                )
        return items
    flat: Array = array.ravel()
    if flat.dtype.kind in "biu":
        if flat.dtype == np.uint64 and flat.size and int(flat.max()) >= 2**63:
            raise ValueError(f"feature {name!r}: {flat.max()} is larger than int64 holds")
        return flat.astype(np.int64)
    if flat.dtype.kind == "f":
        return flat.astype(np.float32)
    raise TypeError(
        f"feature {name!r}: an example holds floating numbers, integers and bytes; got "
        f"{array.dtype}"
    )
