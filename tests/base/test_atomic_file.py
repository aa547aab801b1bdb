"""atomic_file.py: a file is replaced whole or not at all, and nothing else is touched."""

import os
from contextlib import contextmanager

import pytest

from mirror.base import atomic_file
from mirror.base.atomic_file import replace_atomically


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def content(path):
    with replace_atomically(path) as file:
        file.write(b"new")


def test_a_file_is_the_old_one_until_the_end_then_the_new_one(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with replace_atomically(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        assert len(list(tmp_path.iterdir())) == 2
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(error), replace_atomically(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_is_missing_or_a_target_that_is_one_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        content(tmp_path / "none" / "a")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        content(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(("mode", "mask", "got"), [(0o666, 0o022, 0o644), (0o640, 0o077, 0o600)])
def test_the_mode_is_the_one_asked_for_less_the_umask(tmp_path, mode, mask, got):
    with umask(mask), replace_atomically(tmp_path / "a", mode) as file:
        file.write(b"")
    assert (tmp_path / "a").stat().st_mode & 0o777 == got


def test_no_link_is_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    target = tmp_path / "target"
    target.symlink_to(victim)
    content(target)
    assert (victim.read_bytes(), target.read_bytes()) == (b"precious", b"new")
    monkeypatch.setattr(atomic_file.secrets, "token_hex", lambda size: "guessed")
    waiting = tmp_path / "target.guessed.tmp"
    waiting.symlink_to(victim)
    with pytest.raises(FileExistsError):
        content(target)
    assert victim.read_bytes() == b"precious"
    assert waiting.is_symlink()


def test_a_trace_does_not_write_where_a_link_was_laid_for_it(tmp_path, make_strategy):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in (f"trace.json.{os.getpid()}.tmp", "trace.json.tmp"):
        (tmp_path / name).symlink_to(victim)
    strategy = make_strategy()
    with strategy.trace(tmp_path / "trace.json"):
        strategy.run(lambda: None)
    assert victim.read_bytes() == b"precious"
    assert (tmp_path / "trace.json").read_bytes().startswith(b"{")
