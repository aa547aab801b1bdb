"""Damaged files: an error that says so, or the older step; never another, nor wrong numbers."""

import itertools
import random
import shutil

import pytest
import torch

import mirror
from mirror.train.checkpoint.read_checkpoint import read_contents


@pytest.fixture
def saved(tmp_path):
    """A directory with steps 1 and 2, and the files of step 2 with their contents."""
    tensor = torch.arange(30.0)
    checkpoint = mirror.Checkpoint(weight=tensor, tied=tensor[3:9], step={"done": 2})
    checkpoint.objects["step"] = {"done": 1}
    manager = mirror.CheckpointManager(checkpoint, tmp_path)
    manager.save(1)
    checkpoint.objects["step"] = {"done": 2}
    path = manager.save(2).path
    return manager, path, {file: file.read_bytes() for file in path.iterdir()}


def is_refused(path):
    try:
        read_contents(path)
    except mirror.CheckpointError:
        return True
    return False


def offsets(content, count):
    """Both ends, and some between."""
    drawn = random.Random(len(content))
    ends = [*range(60), *range(len(content) - 60, len(content))]
    return ends + [drawn.randrange(len(content)) for _ in range(count)]


def flip_bits(files, path, chosen):
    for file, content in files.items():
        for at in chosen(content):
            flipped = bytearray(content)
            flipped[at] ^= 1 << at % 8
            file.write_bytes(flipped)
            assert is_refused(path), (file.name, at)
        file.write_bytes(content)


def cut(files, path, chosen):
    for file, content in files.items():
        for at in chosen(content):
            file.write_bytes(content[:at])
            assert is_refused(path), (file.name, at)
        file.write_bytes(content)


@pytest.mark.parametrize("harm", [flip_bits, cut])
def test_flipped_bits_and_cuts_are_found(saved, harm):
    _, path, files = saved
    harm(files, path, lambda content: offsets(content, 60))
    assert not is_refused(path)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("harm", [flip_bits, cut])
def test_every_flipped_byte_and_every_cut_is_found(saved, harm):
    _, path, files = saved
    harm(files, path, lambda content: range(len(content)))


def test_rubbish_at_the_end_and_other_contents_are_found(saved):
    _, path, files = saved
    for (file, content), (other, its) in itertools.permutations(files.items()):
        for wrong in (content + b"\0", content * 2, its, b"", b"\x80\x04\x95", b"{}\n"):
            file.write_bytes(wrong)
            assert is_refused(path), (file.name, wrong[:10])
        file.write_bytes(content)
        other.write_bytes(its)


@pytest.mark.parametrize("which", ["checkpoint.json", "tensors-", "all"])
@pytest.mark.parametrize("how", ["missing", "a directory", "unreadable text"])
def test_the_older_step_is_restored(saved, which, how):
    manager, path, files = saved
    state = torch.get_rng_state()
    for file in files:
        if which in (file.name, file.name[:8], "all"):
            file.unlink()
            if how == "a directory":
                file.mkdir()
            elif how != "missing":
                file.write_text("\x00\xff" * 100)
    torch.rand(3)
    manager.checkpoint.objects["weight"].zero_()
    if how == "missing" and which != "tensors-":
        assert manager.restore_latest() == 1
    else:
        with pytest.warns(UserWarning, match="step 1 is restored"):
            assert manager.restore_latest() == 1
    assert manager.checkpoint.objects["step"] == {"done": 1}
    assert torch.equal(manager.checkpoint.objects["weight"], torch.arange(30.0))
    assert torch.equal(torch.get_rng_state(), state)
    if how != "a directory":
        manager.save(2)
        assert manager.latest == 2
        assert not is_refused(path)


def test_files_of_two_checkpoints_do_not_go_together(saved):
    manager, path, files = saved
    manager.checkpoint.objects["weight"].add_(1)
    other = manager.save(3).path
    (data,) = (file for file in files if file.name != "checkpoint.json")
    (theirs,) = other.glob("tensors-*")
    shutil.copy(theirs, data)
    assert is_refused(path)


def test_what_is_damaged_changes_nothing(saved):
    manager, path, files = saved
    (data,) = (file for file in files if file.name != "checkpoint.json")
    data.write_bytes(files[data][:-1])
    manager.checkpoint.objects["weight"].fill_(9)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with pytest.raises(mirror.CheckpointError, match="is cut off"):
        manager.checkpoint.restore(path)
    assert manager.checkpoint.objects["weight"].unique() == 9
    assert torch.equal(torch.get_rng_state(), state)
