"""Reading skeletons: the values that JSON of ``skeleton.py`` stands for, whoever wrote it."""

from __future__ import annotations

import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.torch_private import METADATA
from mirror.train.archive.skeleton import (
    ARRAY_KINDS,
    FACTORIES,
    KEY,
    LAYOUTS,
    MAX_DEPTH,
    NAMES_OF_TORCH,
    SEQUENCES,
    shortened,
)

Get = Callable[[str, str], Tensor]
"""Returns a tensor by its name, on the device that it was on."""

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
    """Something that no checkpoint of ours says."""


def decode(node: Any, get: Get, depth: int = 0) -> Any:
    """Returns the value that JSON stands for.

    Args:
        get: returns a tensor by its name and device.

    Raises:
        Malformed: nothing that ``encode`` returns looks like that.
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
        what = shortened(str(node[KEY])[:200])
        raise Malformed(f"a {what} cannot be read ({error!r:.200})") from error


def _sequence(node: Any, get: Get, depth: int) -> Any:
    return SEQUENCES[node[KEY]](decode(_listed(node["of"]), get, depth))


def _mapping(node: Any, get: Get, depth: int) -> Any:
    pairs = [(decode(k, get, depth), decode(v, get, depth)) for k, v in _listed(node["of"])]
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


def _bytes_of(node: Any, get: Get, depth: int) -> Any:
    raw = (
        bytes.fromhex(node["hex"]) if "hex" in node else get(node["name"], "cpu").numpy().tobytes()
    )
    return raw if node[KEY] == "bytes" else bytearray(raw)


def _array_of(node: Any, get: Get, depth: int) -> Any:
    dtype = _numpy_dtype(node["dtype"])
    raw = bytearray(get(node["name"], "cpu").numpy().tobytes())
    if dtype.itemsize == 0:  # empty strings
        return np.zeros(node["shape"], dtype)
    return np.frombuffer(raw, dtype).reshape(node["shape"])


def _scalar_of(node: Any, get: Get, depth: int) -> Any:
    dtype, raw = _numpy_dtype(node["dtype"]), bytes.fromhex(node["hex"])
    return np.frombuffer(raw, dtype)[0] if dtype.itemsize else dtype.type()


def _tensor(node: Any, get: Get, depth: int) -> Tensor:
    return get(node["name"], node.get("device", "cpu"))


def _sparse_coo(node: Any, get: Get, depth: int) -> Tensor:
    indices, values = (get(name, node.get("device", "cpu")) for name in node["parts"])
    made = torch.sparse_coo_tensor(indices, values, node["size"], check_invariants=True)
    return made.coalesce()


def _compressed(node: Any, get: Get, depth: int) -> Tensor:
    layout = LAYOUTS[node[KEY]][0]
    compressed, plain, values = (get(name, node.get("device", "cpu")) for name in node["parts"])
    return torch.sparse_compressed_tensor(
        compressed, plain, values, node["size"], layout=layout, check_invariants=True
    )


def _torchs(node: Any, get: Get, depth: int) -> Any:
    found = getattr(torch, node["name"])
    if type(found) is not NAMES_OF_TORCH[node[KEY]]:
        raise Malformed(f"torch.{node['name']} is no {node[KEY]}")
    return found


def _enum(node: Any, get: Get, depth: int) -> Any:
    found = _class_of(node["type"])
    if not issubclass(found, Enum):
        raise Malformed(f"{node['type']} is no enum")
    return found.__members__[node["name"]]


def _namedtuple(node: Any, get: Get, depth: int) -> Any:
    found = _class_of(node["type"])
    values = decode(_listed(node["of"]), get, depth)
    if not issubclass(found, tuple) or len(found._fields) != len(values):  # type: ignore[attr-defined]
        raise Malformed(f"{node['type']} is no tuple with {len(values)} named fields")
    return tuple.__new__(found, values)


_DECODERS: dict[str, Callable[[Any, Get, int], Any]] = {
    **dict.fromkeys(SEQUENCES, _sequence),
    **dict.fromkeys(("dict", "OrderedDict", "Counter", "defaultdict"), _mapping),
    **dict.fromkeys(("bytes", "bytearray"), _bytes_of),
    **dict.fromkeys(LAYOUTS, _compressed),
    **dict.fromkeys(NAMES_OF_TORCH, _torchs),
    "array": _array_of,
    "complex": lambda node, get, depth: complex(_float(node["real"]), _float(node["imag"])),
    "deque": lambda node, get, depth: deque(decode(node["of"], get, depth), node["maxlen"]),
    "device": lambda node, get, depth: torch.device(node["name"]),
    "enum": _enum,
    "float": lambda node, get, depth: _float(node["bits"]),
    "int": lambda node, get, depth: int(node["hex"], 16),
    "namedtuple": _namedtuple,
    "scalar": _scalar_of,
    "sparse_coo": _sparse_coo,
    "tensor": _tensor,
}


def _float(bits: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    return float(value)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Malformed(f"{shortened(str(value))} is no list")
    return value


def _numpy_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in ARRAY_KINDS:
        raise Malformed(f"arrays of dtype {name} are not read")
    return dtype


def _class_of(name: str) -> type:
    """Returns a class that the program has; it is not looked for elsewhere."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules[module]
    for part in qualname.split("."):
        found = vars(found)[part]
    if not isinstance(found, type):
        raise Malformed(f"{name} is no class")
    return found
