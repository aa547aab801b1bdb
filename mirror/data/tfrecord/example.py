"""Converts tf.train.Example, the usual record of a TFRecord file, to and from NumPy arrays.

Protocol buffers are read and written by Google's protobuf, of the extra ``[tfrecord]``. It is
imported where it is used.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mirror.errors import RecordError

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


def parse_example(
    data: bytes, features: Mapping[str, FixedLenFeature | VarLenFeature] | None = None
) -> dict[str, Array]:
    """Parses a serialized ``tf.train.Example``, as ``tf.io.parse_single_example`` does.

    Args:
        data: the record.
        features: the features to parse, by name; other features of the example are skipped.
            ``None`` parses all of them, each with all its values.

    Returns:
        An array for every feature, in the order of ``features``, or else of their names: float32,
        int64, or of dtype object for ``bytes``. It is 1-d unless the feature is a
        ``FixedLenFeature``. An empty feature without a type counts as missing, since some writers
        write missing ones so; without ``features`` it is an empty array of dtype object. The
        arrays do not alias ``data``.

    Raises:
        ImportError: protobuf is not installed.
        RecordError: the bytes are no such message, or a feature does not fit ``features``.
    """
    found = _parse("Example", data).features.feature
    if features is None:
        return _all_values(found)
    return {
        name: feature.convert(name, _values(found[name]) if name in found else None)
        for name, feature in features.items()
    }


def parse_sequence_example(data: bytes) -> tuple[dict[str, Array], dict[str, list[Array]]]:
    """Parses a serialized ``tf.train.SequenceExample``.

    Returns:
        The context, as for an example, and the feature lists: by name, a list with an array for
        each step.

    Raises:
        ImportError: protobuf is not installed.
        RecordError: the bytes are no such message.
    """
    example = _parse("SequenceExample", data)
    lists = example.feature_lists.feature_list
    return (
        _all_values(example.context.feature),
        {name: [_values_or_empty(f) for f in lists[name].feature] for name in sorted(lists)},
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
        ImportError: protobuf is not installed.
        TypeError: a value has another type.
        ValueError: an integer is outside the range of int64.
    """
    entries = []
    for name in sorted(features):
        if not isinstance(name, str):
            raise TypeError(f"features have strings as names; got {name!r}")
        entry = message_classes()["Features"]()
        _set_values(entry.feature[name], _flatten(name, features[name]))
        entries.append(entry.SerializeToString())
    # protobuf promises no order of the entries of a map.
    return _wrap(b"".join(entries))


# tensorflow/core/example/example.proto and feature.proto, in the order of the numbers of fields.
_SCHEMA = {
    "BytesList": "repeated bytes value",
    "FloatList": "repeated float value",
    "Int64List": "repeated int64 value",
    "Feature": "BytesList bytes_list; FloatList float_list; Int64List int64_list",  # one of these
    "Features": "repeated Features.FeatureEntry feature",
    "Features.FeatureEntry": "string key; Feature value",  # a map
    "FeatureList": "repeated Feature feature",
    "FeatureLists": "repeated FeatureLists.FeatureListEntry feature_list",
    "FeatureLists.FeatureListEntry": "string key; FeatureList value",  # a map
    "Example": "Features features",
    "SequenceExample": "Features context; FeatureLists feature_lists",
}


@cache
def message_classes() -> Mapping[str, Any]:
    """Returns the classes of protobuf for the messages of the schema, by name.

    Raises:
        ImportError: protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise ImportError(
            "tf.train.Example is read and written by the package protobuf; install it with: "
            "pip install 'mirror-strategy[tfrecord]'"
        ) from error
    proto = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "bytes": proto.TYPE_BYTES,
        "float": proto.TYPE_FLOAT,
        "int64": proto.TYPE_INT64,
        "string": proto.TYPE_STRING,
    }
    file = descriptor_pb2.FileDescriptorProto(name="mirror/example.proto", syntax="proto3")
    described: dict[str, Any] = {}
    for name, fields in _SCHEMA.items():
        outer, _, own = name.rpartition(".")
        message = (described[outer].nested_type if outer else file.message_type).add(name=own)
        if outer:
            message.options.map_entry = True
        for number, declaration in enumerate(fields.split("; "), 1):
            *repeated, kind, field_name = declaration.split()
            field = message.field.add(name=field_name, number=number)
            field.label = proto.LABEL_REPEATED if repeated else proto.LABEL_OPTIONAL
            field.type = scalars.get(kind, proto.TYPE_MESSAGE)
            if kind not in scalars:
                field.type_name = f".{kind}"
            if name == "Feature":
                field.oneof_index = 0
        described[name] = message
    described["Feature"].oneof_decl.add(name="kind")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(name) for name in _SCHEMA}
    return {name: message_factory.GetMessageClass(each) for name, each in found.items()}


def _parse(kind: str, data: object) -> Any:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"a record is bytes; got a {type(data).__name__}")
    message_class = message_classes()[kind]
    from google.protobuf.message import DecodeError

    try:
        return message_class.FromString(bytes(data))
    except DecodeError as error:
        raise RecordError(
            f"malformed tf.train.{kind} of {len(data)} bytes: {error}; is this the record of "
            "another format?"
        ) from error


def _all_values(features: Mapping[str, Any]) -> dict[str, Array]:
    return {name: _values_or_empty(features[name]) for name in sorted(features)}


def _values_or_empty(feature: Any) -> Array:
    values = _values(feature)
    return np.empty(0, object) if values is None else values


def _values(feature: Any) -> Array | None:
    """Returns the values of a Feature; ``None`` if none of the three lists is set."""
    kind = feature.WhichOneof("kind")
    if kind == "bytes_list":
        values = list(feature.bytes_list.value)
        array = np.empty(len(values), object)
        array[:] = values
        return array
    if kind == "float_list":
        # 20 times as fast as a conversion of each number.
        packed = _unwrap(feature.float_list.SerializeToString())
        return np.frombuffer(packed, "<f4").astype(np.float32)
    if kind == "int64_list":
        return np.array(feature.int64_list.value, np.int64)
    return None


def _set_values(feature: Any, array: Array) -> None:
    """Sets a Feature to the values of ``_flatten``, also to none of that type."""
    if array.dtype == object:
        feature.bytes_list.SetInParent()
        feature.bytes_list.value.extend(array.tolist())
    elif array.dtype == np.float32:
        feature.float_list.SetInParent()
        feature.float_list.MergeFromString(_wrap(array.astype("<f4").tobytes()))
    else:
        feature.int64_list.SetInParent()
        feature.int64_list.value.extend(array.tolist())


def _wrap(payload: bytes) -> bytes:
    """Returns a message with these bytes as its field 1: a message, packed numbers or a string."""
    wrapped: bytes = message_classes()["BytesList"](value=[payload]).SerializeToString()
    return wrapped


def _unwrap(message: bytes) -> bytes:
    """Returns what ``_wrap`` was given; nothing for a message without the field."""
    return b"".join(message_classes()["BytesList"].FromString(message).value)


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
