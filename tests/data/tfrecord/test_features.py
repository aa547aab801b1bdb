"""mirror/data/tfrecord/features.py: shapes, defaults, and what is not as said."""

import numpy as np
import pytest
import torch

from mirror.data import (
    FixedLenFeature,
    RecordError,
    VarLenFeature,
    parse_example,
    serialize_example,
)

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
