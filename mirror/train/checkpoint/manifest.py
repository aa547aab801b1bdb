"""The manifest of a checkpoint: JSON that says what is in it, and whose own checksum comes first.

::

    {"blake2b":"0f3c...","checkpoint":{"format":1,"tensors":[...],"views":{...},"objects":{...}}}

Every byte is either fixed, in the checksum, or under it. The checksum finds damage; it is no
signature, so what a manifest says is checked like any input: that tensors fit into the file of
tensors and views into tensors, and that names of files are names of ours.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from mirror.errors import CheckpointError
from mirror.train.checkpoint.aliasing import View
from mirror.train.checkpoint.tensor_file import Stored
from mirror.train.checkpoint.tree_json import Malformed, shortened

FORMAT = 1
MAX_BYTES = 64 * 2**20
"""The largest manifest: what Python makes of JSON is up to 30 times as large."""

_DIGEST_BYTES = 32
_BEGIN, _MIDDLE, _END = b'{"blake2b":"', b'","checkpoint":', b"}\n"
_HEAD_BYTES = len(_BEGIN) + 2 * _DIGEST_BYTES + len(_MIDDLE)
_DATA_NAME = re.compile(r"tensors-[0-9a-f]{16}\.safetensors", re.ASCII)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 2**60


@dataclass(frozen=True)
class SavedTensor:
    """One object's state as it is written.

    Attributes:
        kind: what it is restored as, see ``entries.py``.
        type_name: its class's name.
        state: its state, a skeleton.
    """

    kind: str
    type_name: str
    state: Any


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint.

    Attributes:
        step: how many steps were done, if that was said.
        written_by: the versions of mirror and torch, the time, the number of replicas.
        data_name: the name of the file with the tensors.
        stored: its tensors, in the order of the file.
        views: the other tensors.
        objects: what was saved, by the names that the user gave.
        random: the random generators, a skeleton.
        apart: buffers that replicas keep apart, by the names of modules, a skeleton.
        others: of several workers, what those but the first have of their own, if they have:
            objects' states by name, ``random`` and ``apart``, skeletons.
    """

    step: int | None
    written_by: dict[str, Any]
    data_name: str
    stored: list[Stored]
    views: dict[str, View]
    objects: dict[str, SavedTensor]
    random: Any
    apart: Any
    others: list[dict[str, Any]] = field(default_factory=list)
    sizes: dict[str, int] = field(init=False, default_factory=dict)  # in elements, of the stored

    def __post_init__(self) -> None:
        self.sizes.update((s.name, math.prod(s.shape)) for s in self.stored)

    def to_bytes(self) -> bytes:
        """Returns the file's content.

        Raises:
            CheckpointError: it is too long.
        """
        body = {
            "format": FORMAT,
            "step": self.step,
            "written_by": self.written_by,
            "data": self.data_name,
            "tensors": [
                [s.name, str(s.dtype).removeprefix("torch."), list(s.shape), s.crc32]
                for s in self.stored
            ],
            "views": {
                name: [v.of, list(v.shape), list(v.strides), v.offset]
                for name, v in self.views.items()
            },
            "objects": {
                name: {"kind": s.kind, "type": s.type_name, "state": s.state}
                for name, s in self.objects.items()
            },
            "random": self.random,
            "apart": self.apart,
        }
        if self.others:
            body["workers"] = self.others
        text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        content = _BEGIN + _digest(text) + _MIDDLE + text + _END
        if len(content) > MAX_BYTES:
            raise CheckpointError(
                f"what is no tensor must fit into {MAX_BYTES} bytes of JSON; this state needs "
                f"{len(content)}; keep long lists of numbers as tensors or arrays"
            )
        return content


def parse(content: bytes) -> Manifest:
    """Returns what a manifest says.

    Raises:
        Malformed: it is damaged, or none of ours.
    """
    text = content[_HEAD_BYTES : -len(_END)]
    if not content.startswith(_BEGIN) or not content.endswith(_END):
        raise Malformed("it is cut off, or something else")
    if content[:_HEAD_BYTES] != _BEGIN + _digest(text) + _MIDDLE:
        raise Malformed("its checksum differs")
    try:
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise Malformed(
                f"it has format {shortened(str(body['format']))}, and this version of mirror "
                f"reads format {FORMAT}"
            )
        return _manifest(body)
    except Malformed:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Malformed(f"it is none of ours: {type(error).__name__}: {error}") from error


def _manifest(body: dict[str, Any]) -> Manifest:
    data_name = body["data"]
    if not isinstance(data_name, str) or not _DATA_NAME.fullmatch(data_name):
        raise Malformed(f"{shortened(str(data_name))} is no name of a file of ours")
    step = body["step"]
    if step is not None and (type(step) is not int or step < 0):
        raise Malformed("its step is no number of steps")
    found = Manifest(
        step,
        dict(body["written_by"]),
        data_name,
        [_stored(*entry) for entry in body["tensors"]],
        {name: _view(*view) for name, view in body["views"].items()},
        {name: _saved(**saved) for name, saved in body["objects"].items()},
        body["random"],
        body["apart"],
        [_others(other, body["objects"]) for other in body.get("workers", ())],
    )
    if len(found.sizes) != len(found.stored) or found.sizes.keys() & found.views.keys():
        raise Malformed("a name is given to two tensors")
    for view in found.views.values():
        view.check(found.sizes[view.of])
    return found


def _stored(name: object, dtype: str, shape: object, crc32: object) -> Stored:
    if not isinstance(name, str) or type(crc32) is not int or not 0 <= crc32 < 2**32:
        raise Malformed("a tensor has no name, or no checksum")
    return Stored(name, _DTYPES[dtype], _sizes(shape), crc32)


def _view(of: str, shape: object, strides: object, offset: object) -> View:
    (start,) = _sizes([offset])
    return View(of, _sizes(shape), _counts(strides), start)


def _saved(kind: object, type: object, state: Any) -> SavedTensor:  # noqa: A002
    if not isinstance(kind, str) or not isinstance(type, str):
        raise Malformed("an object has no kind")
    return SavedTensor(kind, type, state)


def _others(other: Any, objects: Any) -> dict[str, Any]:
    if other.keys() != {"objects", "random", "apart"} or other["objects"].keys() - objects.keys():
        raise Malformed("a worker has other objects than the first one")
    return dict(other)


def _sizes(value: object) -> tuple[int, ...]:
    """Returns numbers of elements that torch can count, also all of them together."""
    sizes = _counts(value)
    if math.prod(n for n in sizes if n) >= _MAX_ELEMENTS:
        raise Malformed(f"{shortened(str(value))} is too large a shape")
    return sizes


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        raise Malformed("a shape, or strides, is no short list")
    if any(type(n) is not int or not 0 <= n < _MAX_ELEMENTS for n in value):
        raise Malformed(f"{shortened(str(value))} is no shape, nor strides")
    return tuple(value)


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).hexdigest().encode()
