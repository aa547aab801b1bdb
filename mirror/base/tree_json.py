"""Nested states as JSON: every value exactly, tensors by their names.

``None``, bools, strings, 64-bit integers, finite floats (``repr`` is exact), lists, and dicts with
string keys are JSON as they are. Anything else is an object with the key ``"$"``::

    {"$": "tuple", "of": [1, 2]}             {"$": "dict", "of": [[0, "a"], [1, "b"]]}
    {"$": "float", "bits": "7ff8..."}        {"$": "tensor", "name": "model.weight"}

Only values of these types are read. Enums and named tuples are looked up among the classes that
the program has imported: a file causes no import and no call. A container that occurs twice is
read as two containers; tensors are stored once, see ``snapshot.py``.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from mirror.base.torch_private import METADATA
from mirror.errors import CheckpointError

Put = Callable[[Tensor, str], str]

MAX_DEPTH = 100
"""The deepest nesting: far above any real state, far below the limit of Python's stack."""

KEY = "$"
ARRAY_KINDS = "biufcmMSU"
_LONG_BYTES = 256  # from this length on bytes are stored as a tensor

FACTORIES: dict[str, Any] = {
    f.__name__: f
    for f in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}
SEQUENCES: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}
LAYOUTS: dict[str, tuple[torch.layout, str, str]] = {
    "sparse_csr": (torch.sparse_csr, "crow_indices", "col_indices"),
    "sparse_csc": (torch.sparse_csc, "ccol_indices", "row_indices"),
    "sparse_bsr": (torch.sparse_bsr, "crow_indices", "col_indices"),
    "sparse_bsc": (torch.sparse_bsc, "ccol_indices", "row_indices"),
}
NAMES_OF_TORCH = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def encode(value: Any, path: str, put: Put) -> Any:
    """Returns a value as JSON.

    Args:
        path: its place, for error messages and the names of tensors.
        put: called with each tensor and its path; returns its name.

    Raises:
        CheckpointError: a value in it cannot be written; names its path and type.
    """
    return _Encoder(put).encode(value, path, 0)


class _Encoder:
    def __init__(self, put: Put) -> None:
        self._put = put

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointError(
                f"a state is nested at most {MAX_DEPTH} deep; {shorten(path)} goes deeper, or "
                "contains itself; save its parts instead"
            )
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else _node("int", hex=hex(value))
        if kind is float:
            return value if abs(value) < float("inf") else _node("float", bits=_bits(value))
        if kind is list:
            return self._all(value, path, depth)
        if kind is dict and all(type(key) is str for key in value) and KEY not in value:
            return {k: self.encode(v, f"{path}.{k}", depth + 1) for k, v in value.items()}
        return self._encode_special(value, path, depth)

    def _encode_special(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        for name, sequence in SEQUENCES.items():
            if kind is sequence:
                return _node(name, of=self._all(value, path, depth))
        if kind is deque:
            return _node("deque", of=self._all(value, path, depth), maxlen=value.maxlen)
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return self._encode_mapping(value, path, depth)
        if kind is complex:
            return _node("complex", real=_bits(value.real), imag=_bits(value.imag))
        if kind in (bytes, bytearray):
            return self._bytes(value, path)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, path)
        if kind is torch.device:
            return _node("device", name=str(value))
        for name, named in NAMES_OF_TORCH.items():
            if kind is named:
                return _node(name, name=str(value).removeprefix("torch."))
        if isinstance(value, Enum):
            return _node("enum", type=_class_name(kind), name=value.name)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return _node("namedtuple", type=_class_name(kind), of=self._all(value, path, depth))
        refuse(value, path)

    def _all(self, values: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [self.encode(v, f"{path}.{i}", depth + 1) for i, v in enumerate(values)]

    def _encode_mapping(self, value: Any, path: str, depth: int) -> Any:
        of = [
            [
                k if type(k) is str else self.encode(k, f"{path}.{k!r}", depth + 1),
                self.encode(v, f"{path}.{k}", depth + 1),
            ]
            for k, v in value.items()
        ]
        node = _node(type(value).__name__, of=of)
        if isinstance(value, defaultdict):
            factory = value.default_factory
            name = None if factory is None else getattr(factory, "__name__", "")
            if name is not None and FACTORIES.get(name) is not factory:
                refuse(factory, f"{path}.default_factory")
            node["factory"] = name
        if METADATA in getattr(value, "__dict__", ()):
            metadata = vars(value)[METADATA]
            node["metadata"] = self.encode(metadata, f"{path}.metadata", depth + 1)
        return node

    def _bytes(self, value: bytes | bytearray, path: str) -> Any:
        name = type(value).__name__
        if len(value) < _LONG_BYTES:
            return _node(name, hex=value.hex())
        stored = self._put(torch.frombuffer(bytearray(value), dtype=torch.uint8), path)
        return _node(name, name=stored)

    def _array(self, value: Any, path: str) -> Any:
        if value.dtype.kind not in ARRAY_KINDS:
            refuse(value, path, f"of dtype {value.dtype}")
        if isinstance(value, np.generic):
            return _node("scalar", dtype=value.dtype.str, hex=value.tobytes().hex())
        flat = np.frombuffer(bytearray(value.tobytes()), np.uint8)
        name = self._put(torch.from_numpy(flat), path)
        return _node("array", name=name, dtype=value.dtype.str, shape=list(value.shape))

    def _tensor(self, value: Tensor, path: str) -> Any:
        tensor = value if type(value) is Tensor and not value.requires_grad else value.detach()
        is_odd = type(tensor) is not Tensor or tensor.is_quantized or tensor.is_nested
        if is_odd or tensor.device.type == "meta":
            refuse(value, path, f"on {tensor.device}, of layout {tensor.layout}")
        on = {} if tensor.device.type == "cpu" else {"device": str(tensor.device)}
        if tensor.layout is torch.strided:
            return _node("tensor", name=self._put(tensor, path), **on)
        size = list(tensor.shape)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce()
            parts = self._parts(tensor, path, "indices", "values")
            return _node("sparse_coo", parts=parts, size=size, **on)
        for name, (layout, compressed, plain) in LAYOUTS.items():
            if tensor.layout is layout:
                parts = self._parts(tensor, path, compressed, plain, "values")
                return _node(name, parts=parts, size=size, **on)
        refuse(value, path, f"of layout {tensor.layout}")

    def _parts(self, tensor: Tensor, path: str, *names: str) -> list[str]:
        return [self._put(getattr(tensor, name)(), f"{path}.{name}") for name in names]


def refuse(value: object, path: str, what: str = "") -> NoReturn:
    """Raises CheckpointError for a value that cannot be written."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"a checkpoint holds tensors, numpy values, numbers, strings, bytes, and lists, tuples, "
        f"sets and dicts of them; {shorten(path)} is a {kind}{what and ' '}{what}; leave it "
        "out, or save its parts instead"
    )


def _node(kind: str, **fields: Any) -> dict[str, Any]:
    return {KEY: kind, **fields}


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def shorten(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:97]}...")


Get = Callable[[str, str], Tensor]
"""Returns a tensor by its name, on the device where it was saved."""

_WRONG = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)


class Malformed(ValueError):
    """A file or value that mirror does not write."""


def decode(node: Any, get: Get, depth: int = 0) -> Any:
    """Returns the value that a JSON node stands for.

    Args:
        get: returns a tensor by its name and device.

    Raises:
        Malformed: ``encode`` returns no such node.
    """
    if depth > 2 * MAX_DEPTH:
        raise Malformed("it is nested too deep")
    if isinstance(node, list):
        return [decode(entry, get, depth + 1) for entry in node]
    if not isinstance(node, dict):
        return node
    if KEY not in node:
        return {key: decode(value, get, depth + 1) for key, value in node.items()}
    try:
        return _DECODERS[node[KEY]](node, get, depth + 1)
    except Malformed:
        raise
    except _WRONG as error:
        what = shorten(str(node[KEY])[:200])
        raise Malformed(f"a {what} cannot be read ({error!r:.200})") from error


def _sequence(node: Any, get: Get, depth: int) -> Any:
    return SEQUENCES[node[KEY]](decode(_check_list(node["of"]), get, depth))


def _decode_mapping(node: Any, get: Get, depth: int) -> Any:
    pairs = [(decode(k, get, depth), decode(v, get, depth)) for k, v in _check_list(node["of"])]
    made: Any
    if node[KEY] == "defaultdict":
        name = node["factory"]
        made = defaultdict(None if name is None else FACTORIES[name], pairs)
    elif node[KEY] == "Counter":
        made = Counter()
        made.update(dict(pairs))
    else:
        made = OrderedDict(pairs) if node[KEY] == "OrderedDict" else dict(pairs)
    if "metadata" in node:
        vars(made)[METADATA] = decode(node["metadata"], get, depth)
    return made


def _decode_bytes(node: Any, get: Get, depth: int) -> Any:
    raw = (
        bytes.fromhex(node["hex"]) if "hex" in node else get(node["name"], "cpu").numpy().tobytes()
    )
    return raw if node[KEY] == "bytes" else bytearray(raw)


def _decode_array(node: Any, get: Get, depth: int) -> Any:
    dtype = _numpy_dtype(node["dtype"])
    raw = bytearray(get(node["name"], "cpu").numpy().tobytes())
    if dtype.itemsize == 0:  # empty strings
        return np.zeros(node["shape"], dtype)
    return np.frombuffer(raw, dtype).reshape(node["shape"])


def _decode_scalar(node: Any, get: Get, depth: int) -> Any:
    dtype, raw = _numpy_dtype(node["dtype"]), bytes.fromhex(node["hex"])
    return np.frombuffer(raw, dtype)[0] if dtype.itemsize else dtype.type()


def _tensor(node: Any, get: Get, depth: int) -> Tensor:
    return get(node["name"], node.get("device", "cpu"))


def _sparse_coo(node: Any, get: Get, depth: int) -> Tensor:
    indices, values = (get(name, node.get("device", "cpu")) for name in node["parts"])
    made = torch.sparse_coo_tensor(indices, values, node["size"], check_invariants=True)
    return made.coalesce()


def _decode_compressed(node: Any, get: Get, depth: int) -> Tensor:
    layout = LAYOUTS[node[KEY]][0]
    compressed, plain, values = (get(name, node.get("device", "cpu")) for name in node["parts"])
    return torch.sparse_compressed_tensor(
        compressed, plain, values, node["size"], layout=layout, check_invariants=True
    )


def _torch_constant(node: Any, get: Get, depth: int) -> Any:
    found = getattr(torch, node["name"])
    if type(found) is not NAMES_OF_TORCH[node[KEY]]:
        raise Malformed(f"torch.{node['name']} is not a {node[KEY]}")
    return found


def _enum(node: Any, get: Get, depth: int) -> Any:
    found = _class_of(node["type"])
    if not issubclass(found, Enum):
        raise Malformed(f"{node['type']} is not an enum")
    return found.__members__[node["name"]]


def _namedtuple(node: Any, get: Get, depth: int) -> Any:
    found = _class_of(node["type"])
    values = decode(_check_list(node["of"]), get, depth)
    if not issubclass(found, tuple) or len(found._fields) != len(values):  # type: ignore[attr-defined]
        raise Malformed(f"{node['type']} is not a tuple with {len(values)} named fields")
    return tuple.__new__(found, values)


_DECODERS: dict[str, Callable[[Any, Get, int], Any]] = {
    **dict.fromkeys(SEQUENCES, _sequence),
    **dict.fromkeys(("dict", "OrderedDict", "Counter", "defaultdict"), _decode_mapping),
    **dict.fromkeys(("bytes", "bytearray"), _decode_bytes),
    **dict.fromkeys(LAYOUTS, _decode_compressed),
    **dict.fromkeys(NAMES_OF_TORCH, _torch_constant),
    "array": _decode_array,
    "complex": lambda node, get, depth: complex(_float(node["real"]), _float(node["imag"])),
    "deque": lambda node, get, depth: deque(decode(node["of"], get, depth), node["maxlen"]),
    "device": lambda node, get, depth: torch.device(node["name"]),
    "enum": _enum,
    "float": lambda node, get, depth: _float(node["bits"]),
    "int": lambda node, get, depth: int(node["hex"], 16),
    "namedtuple": _namedtuple,
    "scalar": _decode_scalar,
    "sparse_coo": _sparse_coo,
    "tensor": _tensor,
}


def _float(bits: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    return float(value)


def _check_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Malformed(f"{shorten(str(value))} is not a list")
    return value


def _numpy_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in ARRAY_KINDS:
        raise Malformed(f"arrays of dtype {name} are not read")
    return dtype


def _class_of(name: str) -> type:
    """Returns a class that the program has imported already."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules[module]
    for part in qualname.split("."):
        found = vars(found)[part]
    if not isinstance(found, type):
        raise Malformed(f"{name} is not a class")
    return found
