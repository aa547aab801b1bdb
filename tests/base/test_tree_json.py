"""Nested states are read as written: the same types, to the last bit."""

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mirror
from mirror.base.tree_json import MAX_DEPTH, Malformed, decode, encode
from mirror.train.checkpoint.snapshot import FoundTensors

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    HIGH = 3


def through_json(value):
    tensors = FoundTensors()
    text = json.dumps(encode(value, "v", tensors.add), allow_nan=False)
    stored, views = tensors.split_aliases()

    def get(name, device):
        return stored[name] if name in stored else views[name].make_view(stored)

    return decode(json.loads(text), get)


def same(a, b):
    """Whether two values are of one type, and equal to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.layout, a.dtype, a.shape) != (b.layout, b.dtype, b.shape):
            return False
        return torch.equal(a.to_dense(), b.to_dense())
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


VALUES = [
    None, True, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**200), 0.1, -0.0, 5e-324, math.inf,
    -math.inf, math.nan, "", "caf\u00e9 \ud800 \x00", b"", b"\x00\xff", bytes(1000),
    bytearray(b"x"), 1 + 2j, complex(math.nan, -0.0), [], {}, (), set(), frozenset({1, "a"}),
    [1, [2, (3, {"a": [4.5]})]], {"$": "tensor"}, {"a": 1, "b": {"$": 2}}, {1: 2, "1": 3},
    {(1, 2): "t", None: 0, 2.5: 1, True: 2}, {Colour.RED: Level.HIGH}, Level.HIGH, Point(1, [2]),
    OrderedDict(b=1, a=2), OrderedDict({1: 2}), Counter("abca"), defaultdict(list, {"a": [1]}),
    defaultdict(None, {1: 2}), deque([1, 2], maxlen=5), deque(), torch.Size([2, 3]),
    torch.float32, torch.complex128, torch.device("cuda:3"), torch.strided, torch.channels_last,
    np.float32(0.1), np.int8(-5), np.bool_(True), np.complex64(1j), np.str_("x"), np.str_(""),
    np.datetime64("2026-01-02"), np.arange(6.0).reshape(2, 3), np.array(3), np.array(["ab", "c"]),
    np.empty((0, 3)), np.arange(6).reshape(2, 3).T, np.array([], "U"), np.arange(3, dtype=">i4"),
    torch.tensor(3), torch.empty(0, 4), torch.tensor([1 + 2j]).conj(),
    torch.eye(3).to_sparse(),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was(value):
    back = through_json(value)
    if isinstance(value, torch.Tensor) and value.is_conj():
        value = value.resolve_conj()
    if isinstance(value, (set, frozenset)):
        assert type(back) is type(value)
        assert back == value
    else:
        assert same(back, value)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # "in beta state"
@pytest.mark.parametrize("kind", ["csr", "csc", "bsr", "bsc"])
def test_compressed_tensors_come_back(kind):
    blocks = [(2, 2)] if kind.startswith("b") else []
    value = getattr(torch.eye(4), f"to_sparse_{kind}")(*blocks)
    assert same(through_json(value), value)


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=400)
)  # fmt: skip
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text()), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(NESTED)
@settings(max_examples=150)
def test_any_nested_value_comes_back(value):
    assert same(through_json(value), value)


def test_the_versions_of_modules_are_kept():
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert through_json(state)._metadata == state._metadata


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "name", "kind"),
    [
        ({"a": [1, Odd()]}, "v.a.1", "Odd"),
        ({"f": len}, "v.f", "builtin_function_or_method"),
        (defaultdict(lambda: 1), "v.default_factory", "function"),
        ((np.array([Odd()]),), "v.0", "ndarray of dtype object"),
        ({"m": torch.empty(2, device="meta")}, "v.m", "Tensor on meta"),
        ({"i": type("Int", (int,), {})(3)}, "v.i", "Int"),
        ({Odd: 1}, "Odd", "type"),
    ],
)
def test_what_cannot_be_written_is_named(value, name, kind):
    with pytest.raises(mirror.CheckpointError, match="a checkpoint holds") as caught:
        through_json(value)
    assert name in str(caught.value)
    assert kind in str(caught.value)


def test_a_value_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(mirror.CheckpointError, match=f"at most {MAX_DEPTH} deep"):
        through_json(value)


def deep(n, make):
    value = 0
    for _ in range(n):
        value = make(value)
    return value


@pytest.mark.parametrize("make", [lambda v: [v], lambda v: (v,), lambda v: {1: v}])
def test_what_is_as_deep_as_allowed_comes_back(make):
    value = deep(MAX_DEPTH, make)
    assert through_json(value) == value


@pytest.mark.parametrize(
    "node",
    [
        {"$": "nothing"},
        {"$": ["tuple"]},
        {"$": None},
        {"$": "tuple"},
        {"$": "tuple", "of": 3},
        {"$": "tensor", "name": "absent"},
        {"$": "tensor", "name": []},
        {"$": "set", "of": [[]]},
        {"$": "dict", "of": [[1]]},
        {"$": "dict", "of": [[[], 1]]},
        {"$": "float", "bits": "zz"},
        {"$": "float", "bits": "00"},
        {"$": "int", "hex": "xyz"},
        {"$": "array", "name": "t", "dtype": "O", "shape": [3]},
        {"$": "array", "name": "t", "dtype": "f4", "shape": [2**40]},
        {"$": "array", "name": "t", "dtype": "nonsense", "shape": [3]},
        {"$": "scalar", "dtype": "f8", "hex": ""},
        {"$": "scalar", "dtype": "V8", "hex": "00" * 8},
        {"$": "dtype", "name": "load"},
        {"$": "dtype", "name": "absent"},
        {"$": "defaultdict", "of": [], "factory": "eval"},
        {"$": "enum", "type": "os:system", "name": "x"},
        {"$": "enum", "type": "torch:Tensor", "name": "x"},
        {"$": "enum", "type": "not_imported_at_all:X", "name": "x"},
        {"$": "namedtuple", "type": "builtins:tuple", "of": [1]},
        {"$": "namedtuple", "type": "builtins:int", "of": [1]},
        {"$": "sparse_coo", "parts": ["t", "t"], "size": [2, 2]},
        {"$": "sparse_csr", "parts": ["t", "t", "t"], "size": [2, 2]},
        {"$": "deque", "of": [1], "maxlen": -1},
        {"$": "device", "name": "nowhere:1"},
        {"$": "Size", "of": ["a"]},
    ],
    ids=lambda node: repr(node)[:50],
)
def test_what_nothing_of_ours_wrote_is_malformed(node):
    with pytest.raises(Malformed):
        decode(node, lambda name, device: {"t": torch.ones(3)}[name])


@pytest.mark.parametrize("make", [lambda v: [v], lambda v: {"a": v}, lambda v: tuple_of(v)])
def test_what_is_deeper_than_any_state_is_malformed(make):
    with pytest.raises((Malformed, RecursionError)):
        decode(deep(500, make), None)


def tuple_of(value):
    return {"$": "tuple", "of": [value]}
