"""The directory of a checkpoint: a process killed at any moment leaves the old one or the new one.

A checkpoint is a directory with one file, ``checkpoint.safetensors``. Everything is on the disk
before one system call publishes it: the rename of the file, or of a new directory::

    replaced   write last/.checkpoint.safetensors.tmp-1f        fsync
               rename last/.checkpoint.safetensors.tmp-1f -> last/checkpoint.safetensors
               fsync last
    new        mkdir .last.tmp-2e, and the same in it
               rename .last.tmp-2e -> last                      fsync of the parent

The next save removes the leftovers of a killed process: a process holds a lock on the directory
that it writes into, and the lock ends with the process.
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

FILE_NAME = "checkpoint.safetensors"

_TEMPORARY = f".{FILE_NAME}.tmp-"
_UNSUPPORTED = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def file_of(path: Path) -> Path:
    """Returns the file of a checkpoint."""
    return path / FILE_NAME


def is_checkpoint(path: Path) -> bool:
    """Returns whether there is a checkpoint, whole or damaged."""
    return file_of(path).exists()


def write_directory(path: Path, write: Callable[[int], None]) -> None:
    """Writes a checkpoint, and replaces the one that is there.

    Args:
        write: writes the file to a descriptor, and returns when it is on the disk.

    Raises:
        CheckpointError: there is something that is not a checkpoint.
        OSError: the disk is full, or fails; the old checkpoint stays.
    """
    path = Path(os.path.realpath(path))
    make_directories(path.parent)
    if _has_content(path):
        with locking(path):
            _remove_temporaries(path)
            _write(path, write)
        return
    remove_leftovers(path.parent, f"{path.name}.tmp-")
    temporary = path.with_name(_temporary_name(path.name))
    os.mkdir(temporary)
    try:
        with locking(temporary):
            _write(temporary, write)
            os.rename(temporary, path)
        _sync(path.parent)
    except BaseException:
        with suppress(OSError):
            _remove(temporary)
        raise


def _write(path: Path, write: Callable[[int], None]) -> None:
    temporary = path / _temporary_name(FILE_NAME)
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write(file)
        finally:
            os.close(file)
        os.replace(temporary, file_of(path))
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync(path)


def _has_content(path: Path) -> bool:
    """Returns whether a directory must be replaced from inside; raises CheckpointError."""
    if not os.path.lexists(path):
        return False
    names = sorted(os.listdir(path)) if path.is_dir() else []
    foreign = [name for name in names if not _is_ours(name)]
    if path.is_dir() and not foreign:
        return bool(names)
    found = f"it has {foreign[0]!r}" if foreign else "it is a file"
    raise CheckpointError(
        f"{path} is no checkpoint, and will not be replaced by one: {found}; save to another "
        "path, or remove it"
    )


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint; it is whole until it is gone."""
    away = path.with_name(_temporary_name(path.name))
    os.rename(path, away)
    _remove(away)


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Removes what killed saves and removals have left of checkpoints with this prefix."""
    for name in sorted(os.listdir(parent)):
        with suppress(OSError):
            if name.startswith(f".{prefix}") and ".tmp-" in name:
                with locking(parent / name, wait=False):
                    _remove(parent / name)
            elif name.startswith(prefix):
                with locking(parent / name, wait=False):
                    _remove_temporaries(parent / name)


def _remove(directory: Path) -> None:
    for name in sorted(os.listdir(directory)):
        os.unlink(directory / name)
    os.rmdir(directory)


def _remove_temporaries(path: Path) -> None:
    for name in sorted(os.listdir(path)):
        if name.startswith(_TEMPORARY):
            with suppress(OSError):
                os.unlink(path / name)


def _temporary_name(name: str) -> str:
    # The token is not drawn from the generators that the training draws from.
    return f".{name}.tmp-{secrets.token_hex(8)}"


def _is_ours(name: str) -> bool:
    return name == FILE_NAME or name.startswith(_TEMPORARY)


def make_directories(path: Path) -> None:
    """Creates a directory and its parents, and waits until their names are on the disk."""
    if path.is_dir():
        return
    make_directories(path.parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    _sync(path.parent)


@contextmanager
def locking(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Locks a directory against other processes; the lock ends with the process.

    With ``wait``, nothing is locked where directories cannot be locked, as on NFS.

    Raises:
        OSError: ``wait`` is false, and another process has the lock, or there are no locks.
    """
    # What is to be removed must not be a link to something else.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if wait else os.O_NOFOLLOW)
    directory = os.open(path, flags)
    try:
        if wait:
            with _ignore_unsupported():
                fcntl.flock(directory, fcntl.LOCK_EX)
        else:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            # A child that was forked meanwhile shares the lock until either process releases it.
            with _ignore_unsupported():
                fcntl.flock(directory, fcntl.LOCK_UN)
    finally:
        os.close(directory)


@contextmanager
def _ignore_unsupported() -> Iterator[None]:
    """Ignores the errors of a file system that cannot lock or sync directories."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def _sync(directory: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _ignore_unsupported():
            os.fsync(opened)
    finally:
        os.close(opened)
