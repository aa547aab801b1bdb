"""Writing a checkpoint so that a process killed at any moment leaves the old one or the new one.

[Note: One commit]
A checkpoint is a directory with ``checkpoint.json``, the manifest, and the file of tensors that it
names. Whichever way one is written, everything is on the disk before one system call makes it so:

    new        both files go into a temporary directory beside; that is the rename of the directory
    replaced   no call replaces a directory that is not empty, so the files go into it under names
               of their own; that is the rename of the new manifest over the old one

    mkdir .last.tmp-1f        write tensors-2e  fsync   write checkpoint.json  fsync
    fsync .last.tmp-1f        rename .last.tmp-1f -> last               fsync of the parent
    ---
    write tensors-3d  fsync   write .checkpoint.json-3d  fsync   fsync last
    rename .checkpoint.json-3d -> checkpoint.json   fsync last   unlink tensors-2e

What a killed process leaves is in nobody's way, and the next save removes it: it holds a lock on
what it writes into, which ends with it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mirror.errors import CheckpointError
from mirror.train.checkpoint.manifest import MAX_BYTES, Manifest, parse
from mirror.train.checkpoint.tensor_file import open_regular
from mirror.train.checkpoint.tree_json import Malformed

MANIFEST = "checkpoint.json"

_IMPOSSIBLE = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

Write = Callable[[int, str], bytes]
"""Has the tensors on the disk, by a file descriptor; returns the manifest with their name."""


def write_checkpoint(path: Path, write: Write) -> None:
    """Writes a checkpoint, in place of the one that is there.

    Raises:
        CheckpointError: something else is there.
        OSError: the disk is full, or fails; what was there is there.
    """
    path = Path(os.path.realpath(path))
    make_directories(path.parent)
    if not _is_checkpoint(path):
        _create(path, write)
        return
    with locked(path):
        _replace(path, write)


def read_manifest(path: Path) -> Manifest:
    """Returns what is in a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        content = _content(path / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        there = "is no checkpoint: it has no" if path.exists() else "does not exist, nor its"
        raise CheckpointError(f"{path} {there} {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read ({error})") from error
    try:
        return parse(content)
    except Malformed as error:
        raise CheckpointError(
            f"{path / MANIFEST} is damaged, or of something else: {error}; restore an older "
            "checkpoint"
        ) from error


def has_manifest(path: Path) -> bool:
    """Whether there is a checkpoint, be it damaged or not."""
    return (path / MANIFEST).exists()


def remove_checkpoint(path: Path) -> None:
    """Removes a directory; it is seen whole until it is gone."""
    away = path.with_name(_temporary(path.name))
    os.rename(path, away)
    _remove(away)


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Removes what killed saves have left of checkpoints whose names begin so."""
    for entry in _names(parent):
        if entry.startswith(f".{prefix}") and ".tmp-" in entry:
            with suppress(OSError), locked(parent / entry, wait=False):
                _remove(parent / entry)


def make_directories(path: Path) -> None:
    """Makes a directory and those above it, on the disk, too."""
    if path.is_dir():
        return
    make_directories(path.parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    _sync(path.parent)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Has a directory for this process alone; the lock ends with the process.

    Who waits does without where directories cannot be locked, as on NFS.

    Raises:
        OSError: another one has it, or it cannot be locked, and nobody wants to wait.
    """
    # What is to be removed must not be a link to something else.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if wait else os.O_NOFOLLOW)
    directory = os.open(path, flags)
    try:
        if wait:
            with _unless_impossible():
                fcntl.flock(directory, fcntl.LOCK_EX)
        else:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            # A child that was forked meanwhile has the lock, too, until one of both gives it up.
            with _unless_impossible():
                fcntl.flock(directory, fcntl.LOCK_UN)
    finally:
        os.close(directory)


@contextmanager
def _unless_impossible() -> Iterator[None]:
    """Does without what a file system does not do to directories."""
    try:
        yield
    except OSError as error:
        if error.errno not in _IMPOSSIBLE:
            raise


def _is_checkpoint(path: Path) -> bool:
    """Whether a directory is to be replaced from inside; an empty one is as good as none.

    Raises:
        CheckpointError: it is something that is not ours.
    """
    if not os.path.lexists(path):
        return False
    others = [name for name in _names(path) if not _is_ours(name)] if path.is_dir() else [path]
    if others:
        raise CheckpointError(
            f"{path} is no checkpoint, and will not be replaced by one: "
            + (f"it has {os.path.basename(others[0])!r}" if path.is_dir() else "it is a file")
            + "; save to another path, or remove it"
        )
    return bool(_names(path))


def _create(path: Path, write: Write) -> None:
    remove_leftovers(path.parent, f"{path.name}.tmp-")
    making = path.with_name(_temporary(path.name))
    os.mkdir(making)
    try:
        with locked(making):
            _write_files(making, MANIFEST, write)
            _sync(making)
            os.rename(making, path)
        _sync(path.parent)
    except BaseException:
        with suppress(OSError):
            _remove(making)
        raise


def _replace(path: Path, write: Write) -> None:
    making = f".{MANIFEST}-{_token()}"
    try:
        _write_files(path, making, write)
        _sync(path)
        os.replace(path / making, path / MANIFEST)
        _sync(path)
    finally:
        with suppress(OSError, CheckpointError):
            _sweep(path)


def _write_files(directory: Path, manifest_name: str, write: Write) -> None:
    data_name = f"tensors-{_token()}.safetensors"
    with _new_file(directory / data_name) as file:
        content = write(file, data_name)
    with _new_file(directory / manifest_name) as file:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)


def _sweep(path: Path) -> None:
    """Removes what is of no use in a checkpoint, whatever became of the save."""
    used = {MANIFEST, read_manifest(path).data_name}
    for name in _names(path):
        if name not in used and _is_ours(name):
            os.unlink(path / name)


def _is_ours(name: str) -> bool:
    is_data = name.startswith("tensors-") and name.endswith(".safetensors")
    return is_data or name == MANIFEST or name.startswith(f".{MANIFEST}-")


@contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """Gives a new file to write to."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def _sync(directory: Path) -> None:
    """Has the names in a directory on the disk."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _unless_impossible():
            os.fsync(opened)
    finally:
        os.close(opened)


def _remove(directory: Path) -> None:
    for name in _names(directory):
        os.unlink(directory / name)
    os.rmdir(directory)


def _names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def _temporary(name: str) -> str:
    return f".{name}.tmp-{_token()}"


def _token() -> str:
    return secrets.token_hex(8)  # of the system, not of the streams that the training draws from


def _content(path: Path) -> bytes:
    with open(open_regular(path), "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise CheckpointError(f"{path} is no manifest of ours: it has more than {MAX_BYTES} bytes")
    return content
