"""The files of a checkpoint: manifest, tensors, and how ``mirror checkpoint`` describes them."""

import hashlib
import json
import os
import time

import pytest
import safetensors.torch
import torch
from torch import nn

import mirror
from mirror.cli import main
from mirror.train.checkpoint import tensor_file
from mirror.train.checkpoint.aliasing import Tensors, View
from mirror.train.checkpoint.manifest import Manifest, SavedTensor, parse
from mirror.train.checkpoint.tensor_file import Stored, file_bytes, read_tensors, write_tensors
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


DTYPES = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]


def written(path, tensors):
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        return write_tensors(file, tensors)
    finally:
        os.close(file)


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
    stored = written(tmp_path / "f", MADE)
    back = read_tensors(tmp_path / "f", stored)
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
    written(tmp_path / "f", tensors)
    back = safetensors.torch.load_file(tmp_path / "f")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(bits(back[name]), bits(tensor))


def test_large_tensors_are_written_in_pieces_and_summed_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(tensor_file, "_BESIDE_BYTES", 0)
    monkeypatch.setattr(os, "write", lambda file, data, write=os.write: write(file, data[:700]))
    tensors = {"a": torch.randn(999), "b": torch.randn(10)}
    stored = written(tmp_path / "f", tensors)
    assert (tmp_path / "f").stat().st_size == file_bytes(stored)
    back = read_tensors(tmp_path / "f", stored)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_the_tensor_that_is_damaged_or_cut_off_is_named(tmp_path):
    stored = written(tmp_path / "f", {"a": torch.zeros(4), "b": torch.zeros(4)})
    whole = (tmp_path / "f").read_bytes()
    for content, word in (
        (whole[:-1], "tensor 'b' is cut off"),
        (whole[:-17], "tensor 'a' is cut off"),
        (whole[:3], "header is cut off"),
        (whole + b"x", "bytes"),
        (whole[:-1] + b"\x01", "tensor 'b'"),
        (b"\x01" + whole[1:], "header"),
    ):
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(mirror.CheckpointError, match=word):
            read_tensors(tmp_path / "f", stored)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_only_a_regular_file_is_opened(tmp_path, kind):
    stored = written(tmp_path / "real", {"a": torch.zeros(4)})
    path = tmp_path / "f"
    if kind == "link":
        path.symlink_to(tmp_path / "real")
    elif kind == "pipe":
        os.mkfifo(path)  # which open() would wait at, for ever
    else:
        path.mkdir()
    with pytest.raises(mirror.CheckpointError):
        read_tensors(path, stored)


def parted(*tensors):
    named = Tensors()
    names = [named.put(tensor, f"t{i}") for i, tensor in enumerate(tensors)]
    stored, views = named.parted()
    back = [stored[n] if n in stored else views[n].same_memory(stored) for n in names]
    assert all(map(torch.equal, back, tensors))
    return stored, views


def test_a_tied_weight_is_stored_once():
    weight = torch.randn(4, 3)
    stored, views = parted(weight, weight, weight.t())
    assert list(stored) == ["t0"]
    assert list(views) == ["t1", "t2"]


def test_parts_of_a_flat_tensor_are_views_whatever_comes_first():
    flat = torch.arange(12.0)
    stored, views = parted(flat[2:6].view(2, 2), flat[::3], flat, flat[:1].expand(5))
    assert list(stored) == ["t2"]
    assert views["t0"] == View("t2", (2, 2), (2, 1), 2)


def test_what_overlaps_without_lying_in_another_is_stored_by_itself():
    flat = torch.arange(12.0)
    assert list(parted(flat[:8], flat[4:])[0]) == ["t0", "t1"]


def test_one_memory_under_two_dtypes_is_stored_twice():
    flat = torch.ones(4)
    assert set(parted(flat, flat.view(torch.int32))[0]) == {"t0", "t1"}


def test_what_is_empty_shares_nothing():
    assert len(parted(torch.empty(0), torch.empty(0, 3))[0]) == 2


def test_the_widest_elements_come_first():
    stored, _ = parted(torch.ones(1, dtype=torch.bool), torch.ones(1), torch.ones(1).double())
    assert list(stored) == ["t2", "t1", "t0"]


def test_names_are_unique():
    named = Tensors()
    names = [named.put(torch.ones(1), name) for name in ("a", "a", "a#2", "__metadata__")]
    assert names == ["a", "a#2", "a#2#2", "__metadata__#2"]


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((4,), (1,), 7),
        ((3, 3), (4, 1), 0),
        ((2,), (2**62,), 0),
        ((1,), (1,), 2**62),
        ((2,), (), 0),
    ],
)
def test_a_view_that_reaches_beyond_is_refused(shape, strides, offset):
    with pytest.raises(ValueError, match=r"beyond|strides"):
        View("t", shape, strides, offset).check(10)


@pytest.fixture
def saved(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].tied = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    checkpoint = mirror.Checkpoint(model=model, optimizer=optimizer, epoch=3)
    mirror.CheckpointManager(checkpoint, tmp_path / "run").save(12)
    return tmp_path / "run", model, optimizer


@pytest.mark.parametrize("where", ["directory", "checkpoint"])
@pytest.mark.parametrize("verify", [[], ["--verify"]])
def test_show_tells_names_shapes_and_aliases(saved, capsys, where, verify):
    directory = saved[0]
    path = directory if where == "directory" else directory / "step-000000012"
    assert main(["checkpoint", "show", str(path), *verify]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(directory / "step-000000012")
    assert "step 12" in lines
    assert "model: module, Sequential" in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines if "model." in line}
    assert rows["model.0.weight"] == ["float32", "3x2", "24", "bytes"]
    assert rows["model.0.tied"] == ["float32", "3x2", "the", "same", "as", "model.0.weight"]
    assert rows["model.1.num_batches_tracked"] == ["int64", "one", "8", "bytes"]
    assert ("every byte is as it was written" in lines) is bool(verify)


def test_damage_is_an_error_on_the_command_line(saved, capsys):
    (data,) = (saved[0] / "step-000000012").glob("tensors-*")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert main(["checkpoint", "show", str(saved[0])]) == 0
    assert main(["checkpoint", "show", str(saved[0]), "--verify"]) == 1
    assert "checksum differs" in capsys.readouterr().err
    assert main(["checkpoint", "show", str(saved[0] / "absent")]) == 1


def test_an_exported_file_loads_in_plain_torch(saved, tmp_path, capsys):
    directory, model, optimizer = saved
    out = tmp_path / "out.pt"
    assert main(["checkpoint", "export", str(directory), str(out)]) == 0
    states = torch.load(out)  # weights only, as it is the default
    assert states["epoch"] == 3
    fresh = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    fresh[0].tied = fresh[0].weight
    fresh.load_state_dict(states["model"])
    assert torch.equal(fresh[0].weight, model[0].weight)
    other = torch.optim.Adam(fresh.parameters())
    other.load_state_dict(states["optimizer"])
    assert other.state_dict()["state"][0]["exp_avg"].equal(
        optimizer.state_dict()["state"][0]["exp_avg"]
    )
    size = os.path.getsize(out)
    assert main(["checkpoint", "export", str(directory), str(out)]) == 1  # it is there
    assert os.path.getsize(out) == size
    assert "is there already" in capsys.readouterr().err
