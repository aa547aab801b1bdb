"""The file of a checkpoint: every byte is verified, and nothing in it is trusted."""

import hashlib
import json
import os
import struct
import time

import pytest
import safetensors.torch
import torch

import mirror
from mirror.base.tree_json import Malformed
from mirror.train.checkpoint import checkpoint_file
from mirror.train.checkpoint.checkpoint_file import (
    Manifest,
    ObjectState,
    StoredTensor,
    TensorView,
    WorkerStates,
    parse_manifest,
    read_file,
    read_manifest,
    write_file,
)
from mirror.train.checkpoint.snapshot import FoundTensors


def manifest(**changes):
    given = {
        "step": 3,
        "tensors": [StoredTensor("a", torch.float32, (2, 3), 7)],
        "views": {"b": TensorView("a", (3,), (2,), 1)},
        "workers": [WorkerStates({"model": ObjectState("module", "Net", {"x": 1})}, {}, {})],
        "written_by": {"torch": "2"},
    }
    return Manifest(**{**given, **changes})


def body(**changes):
    return {**json.loads(manifest().to_text()), **changes}


def states(**objects):
    return {"objects": objects, "random": {}, "buffers": {}}


def test_what_is_written_is_read():
    text = manifest().to_text()
    assert parse_manifest(text) == manifest()
    assert json.loads(text)["tensors"] == [["a", "float32", [2, 3], "00000007"]]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 3},
        {"format": "x" * 10**6},
        {"step": -1},
        {"step": True},
        {"step": "1"},
        {"tensors": [["a", "float32", [2, -3], "7"]]},
        {"tensors": [["a", "float32", [2, 3.0], "7"]]},
        {"tensors": [["a", "float32", [2**62], "7"]]},
        {"tensors": [["a", "float32", [2**40, 2**40, 0], "7"]]},
        {"tensors": [["a", "float32", [1] * 65, "7"]]},
        {"tensors": [["a", "float32", [2, True], "7"]]},
        {"tensors": [["a", "Tensor", [2], "7"]]},
        {"tensors": [["a", ["float32"], [2], "7"]]},
        {"tensors": [["a", "float32", [2, 3], 7]]},
        {"tensors": [["a", "float32", [2, 3]]]},
        {"tensors": [["a", "float32", [2, 3], "7"]] * 2},
        {"tensors": {"a": 1}},
        {"tensors": None},
        {"views": {"a": ["a", [1], [1], 0]}},
        {"views": {"b": ["a", [7], [1], 0]}},
        {"views": {"b": ["a", [1], [1], -1]}},
        {"views": {"b": ["a", [2], [-1], 1]}},
        {"views": {"b": ["a", [3, 3], [4, 1], 0]}},
        {"views": {"b": ["a", [2], [2**62], 0]}},
        {"views": {"b": ["a", [2], [], 0]}},
        {"views": {"b": ["b", [1], [1], 0]}},
        {"views": {"b": ["absent", [1], [1], 0]}},
        {"views": {"b": [["a"], [1], [1], 0]}},
        {"views": []},
        {"workers": []},
        {"workers": [states(model=["module", "Net"])]},
        {"workers": [states(model=[3, "Net", 1])]},
        {"workers": [states(model=["module", "Net", 1, 1])]},
        {"workers": [states(), states(model=["module", "Net", 1])]},
        {"workers": [{"objects": {}, "random": {}}]},
        {"workers": [1]},
        {"written_by": 3},
    ],
    ids=lambda changes: repr(changes)[:60],
)
def test_what_no_save_says_is_malformed(changes):
    with pytest.raises(Malformed):
        parse_manifest(json.dumps(body(**changes)))


def file_with(path, header, content=b""):
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)
    return path


@pytest.mark.parametrize("text", [b"[" * 10**6, b"{" * 10**6, b"1", b"null", b"[]", b"1" * 10**5])
def test_json_of_any_shape_is_refused_in_little_time(tmp_path, text):
    digest = hashlib.blake2b(text, digest_size=32).hexdigest()
    metadata = {"blake2b": digest, "mirror": text.decode()}
    begun = time.process_time()
    for header in (text, json.dumps({"__metadata__": metadata}).encode()):
        with pytest.raises(mirror.CheckpointError, match="damaged, or not a checkpoint"):
            read_manifest(file_with(tmp_path / "f", header))
    assert time.process_time() - begun < 5


def test_a_header_that_is_too_long_is_neither_written_nor_read(tmp_path, monkeypatch):
    written(tmp_path / "f", {"a": torch.zeros(4)})
    monkeypatch.setattr(checkpoint_file, "MAX_HEADER_BYTES", 100)
    with pytest.raises(mirror.CheckpointError, match="more than 100 bytes"):
        read_manifest(tmp_path / "f")
    with pytest.raises(mirror.CheckpointError, match="must fit into 100 bytes"):
        written(tmp_path / "g", {"a": torch.zeros(4)})


DTYPES = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]


def written(path, tensors):
    """Writes a file that has tensors only; returns its path."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        write_file(file, Manifest(None, (), {}, [WorkerStates({}, {}, {})]), tensors)
    finally:
        os.close(file)
    return path


def of_dtype(dtype):
    try:
        return torch.arange(1, 7).to(torch.uint8).repeat(16).view(dtype)
    except (RuntimeError, NotImplementedError):
        return None


MADE = {str(dtype): tensor for dtype in set(DTYPES) if (tensor := of_dtype(dtype)) is not None}


def bits(tensor):
    flat = tensor.reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


def test_tensors_of_every_dtype_come_back(tmp_path):
    assert len(MADE) > 15
    _, back = read_file(written(tmp_path / "f", MADE))
    for name, tensor in MADE.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(back[name]), bits(tensor))


def test_safetensors_reads_the_file(tmp_path):
    tensors = {
        "a": torch.randn(3, 2),
        "b": torch.tensor(7),
        "c": torch.empty(0, 2),
        "\u00e9": MADE["torch.bfloat16"],
    }
    back = safetensors.torch.load_file(written(tmp_path / "f", tensors))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(bits(back[name]), bits(tensor))


def test_large_tensors_are_written_in_chunks_while_a_thread_computes_checksums(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint_file, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(checkpoint_file, "_THREAD_BYTES", 0)
    monkeypatch.setattr(os, "write", lambda file, data, write=os.write: write(file, data[:700]))
    tensors = {"a": torch.randn(999), "b": torch.randn(10)}
    _, back = read_file(written(tmp_path / "f", tensors))
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_the_tensor_that_is_damaged_or_cut_off_is_named(tmp_path):
    written(tmp_path / "f", {"a": torch.zeros(4), "b": torch.zeros(4)})
    whole = (tmp_path / "f").read_bytes()
    for content, word in (
        (whole[:-1], "tensor 'b' is cut off"),
        (whole[:-17], "tensor 'a' is cut off"),
        (whole[:3], "header is cut off"),
        (whole[:60], "header is cut off"),
        (whole + b"x", "bytes"),
        (whole[:-1] + b"\x01", "tensor 'b'"),
        (b"\x01" + whole[1:], "damaged"),
    ):
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(mirror.CheckpointError, match=word):
            read_file(tmp_path / "f")


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_only_a_regular_file_is_opened(tmp_path, kind):
    written(tmp_path / "real", {"a": torch.zeros(4)})
    path = tmp_path / "f"
    if kind == "link":
        path.symlink_to(tmp_path / "real")
    elif kind == "pipe":
        os.mkfifo(path)  # open() would wait for it forever
    else:
        path.mkdir()
    with pytest.raises(mirror.CheckpointError):
        read_file(path)


# Tensors that share memory are stored once, and share memory again


def split(*tensors):
    named = FoundTensors()
    names = [named.add(tensor, f"t{i}") for i, tensor in enumerate(tensors)]
    stored, views = named.split_aliases()
    back = [stored[n] if n in stored else views[n].make_view(stored) for n in names]
    assert all(map(torch.equal, back, tensors))
    return stored, views


def test_a_tied_weight_is_stored_once():
    weight = torch.randn(4, 3)
    stored, views = split(weight, weight, weight.t())
    assert list(stored) == ["t0"]
    assert list(views) == ["t1", "t2"]


def test_parts_of_a_flat_tensor_are_views_in_any_order():
    flat = torch.arange(12.0)
    stored, views = split(flat[2:6].view(2, 2), flat[::3], flat, flat[:1].expand(5))
    assert list(stored) == ["t2"]
    assert views["t0"] == TensorView("t2", (2, 2), (2, 1), 2)


def test_what_overlaps_without_lying_in_another_is_stored_by_itself():
    flat = torch.arange(12.0)
    assert list(split(flat[:8], flat[4:])[0]) == ["t0", "t1"]


def test_one_memory_under_two_dtypes_is_stored_twice():
    flat = torch.ones(4)
    assert set(split(flat, flat.view(torch.int32))[0]) == {"t0", "t1"}


def test_what_is_empty_shares_nothing():
    assert len(split(torch.empty(0), torch.empty(0, 3))[0]) == 2


def test_the_widest_elements_come_first():
    stored, _ = split(torch.ones(1, dtype=torch.bool), torch.ones(1), torch.ones(1).double())
    assert list(stored) == ["t2", "t1", "t0"]


def test_names_are_unique():
    named = FoundTensors()
    names = [named.add(torch.ones(1), name) for name in ("a", "a", "a#2", "__metadata__")]
    assert names == ["a", "a#2", "a#2#2", "__metadata__#2"]
