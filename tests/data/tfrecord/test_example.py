"""Examples and features to and from arrays, as in TensorFlow."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.data import (
    FixedLenFeature,
    RecordError,
    TFRecordDataset,
    VarLenFeature,
    parse_example,
    parse_sequence_example,
    serialize_example,
)
from mirror.data.tfrecord.example import message_classes
from tests.data.tfrecord.files.values import CONTEXT, EXAMPLES, KINDS, STEPS

FILES = Path(__file__).parent / "files"
DTYPES = {bytes: object, float: np.float32, int: np.int64}
# Feature = 3 int64: the fields below are put together by hand, as no serializer would.
NAME_X = b"\x0a\x01x"


def message(*fields):
    """A message of delimited fields, each shorter than 128 bytes."""
    return b"".join(bytes([number << 3 | 2, len(payload)]) + payload for number, payload in fields)


def example(*features):
    """An example with the feature x, which comes in these pieces."""
    return message((1, message((1, NAME_X + message(*((2, piece) for piece in features))))))


def assert_holds(parsed, values):
    assert set(parsed) == set(values)
    for name, expected in values.items():
        dtype = DTYPES[KINDS[name] if name in KINDS else type(expected[0])]
        assert parsed[name].dtype == dtype
        assert parsed[name].tolist() == np.array(expected, dtype).tolist()


# files of TensorFlow


def test_examples_of_tensorflow_are_parsed_exactly():
    parsed = list(TFRecordDataset(FILES / "examples.tfrecord", transform=parse_example))
    assert len(parsed) == len(EXAMPLES)
    for found, values in zip(parsed, EXAMPLES, strict=True):
        assert_holds(found, values)


def test_we_serialize_the_bytes_that_tensorflow_does():
    records = list(TFRecordDataset(FILES / "examples.tfrecord"))
    for record, values in zip(records, EXAMPLES, strict=True):
        arrays = {
            name: np.array(value, DTYPES[KINDS[name]]) if name in KINDS else value
            for name, value in values.items()
        }
        assert serialize_example(arrays) == record


def test_a_sequence_example_of_tensorflow_is_parsed_exactly():
    (record,) = TFRecordDataset(FILES / "sequence.tfrecord")
    context, lists = parse_sequence_example(record)
    assert_holds(context, CONTEXT)
    assert {name: [s.tolist() for s in steps] for name, steps in lists.items()} == STEPS
    assert [step.dtype for step in lists["frame"]] == [np.float32] * 2


FEATURES = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        st.lists(st.binary(max_size=200), min_size=1, max_size=40),
        st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40),
    ),
    max_size=5,
)


@settings(derandomize=True)
@given(FEATURES)
def test_what_is_written_is_read(values):
    assert_holds(parse_example(serialize_example(values)), values)


# encodings


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (b"\x1a\x05\x0a\x03\x01\x96\x01", [1, 150]),  # packed
        (b"\x1a\x05\x08\x01\x08\x96\x01", [1, 150]),  # not packed
        (b"\x1a\x05\x08\x01\x0a\x01\x02", [1, 2]),  # both
        (b"\x1a\x02\x08\x01\x1a\x02\x08\x02", [1, 2]),  # the list in two pieces
        (b"\x12\x05\x0d\x00\x00\x80\x3f\x1a\x02\x08\x02", [2]),  # of a oneof the last counts
        (b"\x1a\x0b\x08" + b"\xff" * 9 + b"\x01", [-1]),
        (b"\x1a\x04\x38\x05\x08\x07", [7]),  # an unknown field in the list
        (b"\x22\x01\x00\x1a\x02\x08\x07", [7]),  # an unknown kind of list
        (b"\x12\x0a\x0d\x00\x00\x80\x3f\x0d\x00\x00\x00\xc0", [1.0, -2.0]),
        (b"\x12\x0a\x0a\x08\x00\x00\x80\x3f\x00\x00\x00\xc0", [1.0, -2.0]),
        (b"\x12\x00", []),
    ],
)
def test_every_encoding_of_a_list_is_read(piece, expected):
    assert parse_example(example(piece))["x"].tolist() == expected


def test_pieces_of_a_feature_are_one_feature():
    assert parse_example(example(b"\x1a\x02\x08\x01", b"\x1a\x02\x08\x02"))["x"].tolist() == [1, 2]


def test_of_equal_names_the_last_counts():
    data = example(b"\x1a\x02\x08\x01") + example(b"\x1a\x02\x08\x02")
    assert parse_example(data)["x"].tolist() == [2]


def test_an_untyped_feature_is_missing():
    data = example(b"")
    assert parse_example(data)["x"].tolist() == []
    features = {"x": FixedLenFeature((), int, default_value=5)}
    assert parse_example(data, features)["x"] == 5


def test_no_bytes_are_an_example_without_features():
    assert parse_example(b"") == {}


def test_arrays_are_the_callers_own():
    data = serialize_example({"f": [1.0, 2.0], "i": [1, 2], "many": np.arange(100)})
    first, second = parse_example(data), parse_example(data)
    for array in first.values():
        array[0] = 9
    assert [array[0] for array in second.values()] == [1, 1, 0]


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\x05",  # 5 bytes, and there are none
        message((1, message((1, b"\x0a\x01\xff")))),  # a name that is not UTF-8
        example(b"\x12\x05\x0a\x03\x00\x00\x80"),  # 3 bytes of float32
        example(b"\x1a\x03\x0a\x01\x80"),  # a number that ends inside
        b"\x0b" * 100_000 + b"\x0c" * 100_000,  # groups in groups
        b"not an example",
    ],
)
def test_a_malformed_example_raises_a_record_error(data):
    with pytest.raises(RecordError, match=rf"^malformed tf\.train\.Example of {len(data)} "):
        parse_example(data)
    with pytest.raises(RecordError, match=r"^malformed tf"):
        parse_sequence_example(data)


def test_without_protobuf_an_error_names_the_extra(monkeypatch):
    record = serialize_example({"x": 1})
    message_classes.cache_clear()
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    features = {"x": FixedLenFeature((), int)}
    for use in (
        lambda: parse_example(record, features),
        lambda: parse_sequence_example(record),
        lambda: serialize_example({"x": 1}),
        lambda: TFRecordDataset(FILES / "examples.tfrecord", features=features),
    ):
        with pytest.raises(ImportError, match=r"protobuf.*'mirror-strategy\[tfrecord\]'"):
            use()
    assert len(TFRecordDataset(FILES / "examples.tfrecord")) == len(EXAMPLES)


def test_a_record_is_bytes():
    with pytest.raises(TypeError, match="a record is bytes; got a str"):
        parse_example("text")
    assert parse_example(memoryview(serialize_example({"x": 1})))["x"] == 1


# serializing


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, [3]),
        (2.5, [2.5]),
        (True, [1]),
        (b"\x00\x00", [b"\x00\x00"]),
        ("\u00e9", [b"\xc3\xa9"]),
        (["a", b"b\x00"], [b"a", b"b\x00"]),
        (np.array([b"a", "b"], object), [b"a", b"b"]),
        (np.array([[1, 2], [3, 4]], np.uint8).T, [1, 3, 2, 4]),
        (np.float64(0.5), [0.5]),
        (np.array([0.5], np.float16), [0.5]),
        (torch.arange(3), [0, 1, 2]),
        (np.array([], np.int64), []),
        ([], []),
        (np.array([2**63 - 1], np.uint64), [2**63 - 1]),
    ],
)
def test_what_is_serialized_comes_back(value, expected):
    assert parse_example(serialize_example({"x": value}))["x"].tolist() == expected


@pytest.mark.parametrize(
    ("features", "error", "what"),
    [
        ({"x": 1j}, TypeError, "'x': an example holds .*complex128"),
        ({"x": None}, TypeError, "'x'.*NoneType"),
        ({"x": [1, b"a"]}, TypeError, "'x': values are all numbers or all bytes"),
        ({"x": 2**63}, ValueError, "'x': 9223372036854775808 is larger"),
        ({"x": 2**70}, ValueError, "'x': .*int64"),
        ({1: 2}, TypeError, "strings as names; got 1"),
    ],
)
def test_what_an_example_cannot_hold_is_refused(features, error, what):
    with pytest.raises(error, match=what):
        serialize_example(features)


def test_serializing_leaves_the_callers_array_as_it_is():
    words = np.array(["a", "b"], object)
    serialize_example({"x": words})
    assert words.tolist() == ["a", "b"]


IMAGE = serialize_example(
    {"image": b"\x89PNG\x00", "label": 3, "box": np.arange(4.0).reshape(2, 2), "tags": ["a", "b"]}
)


def test_features_give_shapes_and_leave_the_rest_out():
    parsed = parse_example(
        IMAGE,
        {
            "image": FixedLenFeature((), bytes),
            "label": FixedLenFeature([], np.int64),
            "box": FixedLenFeature((2, 2), "float32"),
            "tags": VarLenFeature(bytes),
        },
    )
    assert parsed["image"].shape == ()
    assert parsed["image"].item() == b"\x89PNG\x00"
    assert parsed["label"].shape == ()
    assert parsed["label"].dtype == np.int64
    assert parsed["box"].tolist() == [[0, 1], [2, 3]]
    assert parsed["tags"].tolist() == [b"a", b"b"]
    assert set(parse_example(IMAGE, {"label": VarLenFeature(int)})) == {"label"}


def test_missing_features_take_their_defaults():
    parsed = parse_example(
        b"",
        {
            "weight": FixedLenFeature((2,), np.float32, default_value=1),
            "box": FixedLenFeature((2, 2), np.float32, default_value=[0, 1]),
            "name": FixedLenFeature((), bytes, default_value=b"none"),
            "tags": VarLenFeature(bytes),
            "ids": VarLenFeature(np.int64),
        },
    )
    assert parsed["weight"].tolist() == [1, 1]
    assert parsed["weight"].dtype == np.float32
    assert parsed["box"].tolist() == [[0, 1], [0, 1]]
    assert parsed["name"].item() == b"none"
    assert parsed["tags"].dtype == object
    assert parsed["tags"].shape == parsed["ids"].shape == (0,)
    assert parsed["ids"].dtype == np.int64


def test_a_default_is_copied_for_every_example():
    features = {"x": FixedLenFeature((2,), np.float32, default_value=0.0)}
    parse_example(b"", features)["x"][0] = 9
    assert parse_example(b"", features)["x"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("feature", "what"),
    [
        ({"depth": FixedLenFeature((), int)}, "'depth' is required, and the example has none"),
        ({"label": FixedLenFeature((), np.float32)}, "'label' holds int64, not float32"),
        ({"image": VarLenFeature(int)}, "'image' holds bytes, not int64"),
        ({"label": FixedLenFeature((), bytes)}, "'label' holds int64, not bytes"),
        ({"box": FixedLenFeature((3,), np.float32)}, r"'box' has 4 values.*shape \(3,\)"),
        ({"tags": FixedLenFeature((), bytes)}, r"'tags' has 2 values.*shape \(\)"),
    ],
)
def test_a_feature_that_is_not_as_said_is_refused(feature, what):
    with pytest.raises(RecordError, match=what):
        parse_example(IMAGE, feature)


@pytest.mark.parametrize(
    ("make", "error", "what"),
    [
        (lambda: FixedLenFeature((), np.float64), ValueError, "float32, numpy.int64 or bytes"),
        (lambda: VarLenFeature(np.int32), ValueError, "got int32"),
        (lambda: VarLenFeature(str), ValueError, "or bytes"),
        (lambda: VarLenFeature(torch.int64), TypeError, "got torch.int64"),  # type: ignore[arg-type]
        (lambda: VarLenFeature("float23"), TypeError, "or bytes.*got 'float23'"),
        (lambda: FixedLenFeature(3, int), TypeError, "sequence of.*got 3"),  # type: ignore[arg-type]
        (lambda: FixedLenFeature((-1,), int), ValueError, "use VarLenFeature"),
        (lambda: FixedLenFeature((2.5,), int), TypeError, "integer"),  # type: ignore[arg-type]
        (lambda: FixedLenFeature((2,), int, [1, 2, 3]), ValueError, "broadcast"),
        (lambda: FixedLenFeature((), int, 0.5), TypeError, "same_kind"),
        (lambda: FixedLenFeature((), bytes, "text"), TypeError, "is bytes; got 'text'"),
    ],
)
def test_a_feature_that_cannot_be_is_refused_at_once(make, error, what):
    with pytest.raises(error, match=what):
        make()
