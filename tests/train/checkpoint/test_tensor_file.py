"""The file of tensors: safetensors that others read, each tensor under a checksum."""

import os

import pytest
import safetensors.torch
import torch

import mirror
from mirror.train.checkpoint import tensor_file
from mirror.train.checkpoint.tensor_file import file_bytes, read_tensors, write_tensors

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
