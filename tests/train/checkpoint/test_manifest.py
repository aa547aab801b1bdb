"""The manifest: no byte of it can differ unnoticed, and what it says is not believed."""

import hashlib
import json
import time

import pytest
import torch

from mirror.train.checkpoint.aliasing import View
from mirror.train.checkpoint.manifest import Manifest, SavedTensor, parse
from mirror.train.checkpoint.tensor_file import Stored
from mirror.train.checkpoint.tree_json import Malformed

NAME = "tensors-0123456789abcdef.safetensors"


def manifest(**changes):
    given = {
        "step": 3,
        "written_by": {"torch": "2"},
        "data_name": NAME,
        "stored": [Stored("a", torch.float32, (2, 3), 7)],
        "views": {"b": View("a", (3,), (2,), 1)},
        "objects": {"model": SavedTensor("module", "Net", {"x": 1})},
        "random": {},
        "apart": {},
    }
    return Manifest(**{**given, **changes})


def signed(body):
    """Returns what a program would write that knows the format, and means ill."""
    text = json.dumps(body).encode()
    digest = hashlib.blake2b(text, digest_size=32).hexdigest().encode()
    return b'{"blake2b":"' + digest + b'","checkpoint":' + text + b"}\n"


def body(**changes):
    return {**json.loads(manifest().to_bytes())["checkpoint"], **changes}


def test_what_is_written_is_read():
    content = manifest().to_bytes()
    assert parse(content) == manifest()
    assert parse(signed(body())) == manifest()
    assert json.loads(content)["checkpoint"]["tensors"] == [["a", "float32", [2, 3], 7]]


def test_every_flipped_bit_and_every_cut_is_found():
    content = manifest().to_bytes()
    for at in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            with pytest.raises(Malformed):
                parse(bytes(flipped))
        with pytest.raises(Malformed):
            parse(content[:at])
    for more in (b"\n", b"x", content):
        with pytest.raises(Malformed):
            parse(content + more)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"format": "x" * 10**6},
        {"data": "../tensors-0123456789abcdef.safetensors"},
        {"data": "/etc/passwd"},
        {"data": NAME + "\n"},
        {"data": 3},
        {"step": -1},
        {"step": True},
        {"step": "1"},
        {"tensors": [["a", "float32", [2, -3], 7]]},
        {"tensors": [["a", "float32", [2, 3.0], 7]]},
        {"tensors": [["a", "float32", [2**62], 7]]},
        {"tensors": [["a", "float32", [2**40, 2**40, 0], 7]]},
        {"tensors": [["a", "float32", [1] * 65, 7]]},
        {"tensors": [["a", "float32", [2, True], 7]]},
        {"tensors": [["a", "Tensor", [2], 7]]},
        {"tensors": [["a", ["float32"], [2], 7]]},
        {"tensors": [["a", "float32", [2, 3], "7"]]},
        {"tensors": [["a", "float32", [2, 3]]]},
        {"tensors": [["a", "float32", [2, 3], 7]] * 2},
        {"tensors": {"a": 1}},
        {"tensors": None},
        {"views": {"a": ["a", [1], [1], 0]}},
        {"views": {"b": ["a", [7], [1], 0]}},
        {"views": {"b": ["a", [1], [1], -1]}},
        {"views": {"b": ["a", [2], [-1], 1]}},
        {"views": {"b": ["b", [1], [1], 0]}},
        {"views": {"b": ["absent", [1], [1], 0]}},
        {"views": {"b": [["a"], [1], [1], 0]}},
        {"views": []},
        {"objects": {"model": {"kind": "module", "type": "Net"}}},
        {"objects": {"model": {"kind": 3, "type": "Net", "state": 1}}},
        {"objects": {"model": {"kind": "m", "type": "Net", "state": 1, "more": 1}}},
        {"objects": [1]},
        {"written_by": 3},
    ],
    ids=lambda changes: repr(changes)[:60],
)
def test_what_no_save_says_is_malformed(changes):
    with pytest.raises(Malformed):
        parse(signed(body(**changes)))


@pytest.mark.parametrize("text", [b"[" * 10**6, b"{" * 10**6, b"1", b"null", b"[]", b"1" * 10**5])
def test_json_of_any_shape_is_malformed_in_little_time(text):
    digest = hashlib.blake2b(text, digest_size=32).hexdigest().encode()
    begun = time.process_time()
    with pytest.raises(Malformed):
        parse(b'{"blake2b":"' + digest + b'","checkpoint":' + text + b"}\n")
    assert time.process_time() - begun < 5
