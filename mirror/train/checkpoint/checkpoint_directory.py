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

Only files that a checkpoint writes are removed. A directory is opened without following links,
and its files are removed through that descriptor. So a link, or another directory that takes its
place meanwhile, loses nothing. A link is removed itself; its target stays.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mirror.errors import CheckpointError

FILE_NAME = "checkpoint.safetensors"

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = re.compile(rf"{re.escape(FILE_NAME)}|\.{re.escape(FILE_NAME)}\.tmp-[0-9a-f]+")
_UNSUPPORTED = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_log = logging.getLogger("mirror")


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
        with locking(path) as directory:
            _remove_temporaries(directory)
            _write(directory, write)
        return
    remove_leftovers(path.parent, re.escape(path.name))
    temporary = path.with_name(_temporary_name(path.name))
    os.mkdir(temporary)
    try:
        with locking(temporary) as directory:
            _write(directory, write)
            os.rename(temporary, path)
        _sync(path.parent)
    except BaseException:
        with suppress(OSError):
            _remove(temporary)
        raise


def _write(directory: int, write: Callable[[int], None]) -> None:
    temporary = _temporary_name(FILE_NAME)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        file = os.open(temporary, flags, 0o666, dir_fd=directory)
        try:
            write(file)
        finally:
            os.close(file)
        os.replace(temporary, FILE_NAME, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
    with _ignore_unsupported():
        os.fsync(directory)


def _has_content(path: Path) -> bool:
    """Returns whether a directory must be replaced from inside; raises CheckpointError."""
    if not os.path.lexists(path):
        return False
    found = "it is a file"
    if path.is_dir():
        with _opening(path) as directory:
            written, foreign = _names_in(directory)
        if not foreign:
            return bool(written)
        found = f"it has {foreign[0]!r}"
    raise CheckpointError(
        f"{path} is no checkpoint, and will not be replaced by one: {found}; save to another "
        "path, or remove it"
    )


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint; it is whole until it is gone.

    A directory with other files loses the checkpoint's file only, and stays.

    Raises:
        OSError: it could not be removed, or another directory took its place meanwhile.
    """
    if path.is_symlink():
        os.unlink(path)
        return
    with _opening(path) as directory:
        _, foreign = _names_in(directory)
        if foreign:
            os.unlink(FILE_NAME, dir_fd=directory)
            _log.warning(
                "%s stays: it has %r, which no checkpoint writes; its checkpoint is removed",
                path,
                foreign[0],
            )
            return
        away = path.with_name(_temporary_name(path.name))
        os.rename(path, away)
        if not os.path.samestat(os.lstat(away), os.fstat(directory)):
            os.rename(away, path)
            raise OSError(errno.EBUSY, "another directory took its place", str(path))
        _remove_files(directory)
        try:
            os.rmdir(away)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # a file was added meanwhile
                os.rename(away, path)
            raise


def remove_leftovers(parent: Path, names: str) -> None:
    """Removes what killed saves and removals have left of checkpoints in a directory.

    Args:
        names: a regular expression of the checkpoints' names.
    """
    temporary = re.compile(rf"\.(?:{names})\.tmp-[0-9a-f]+", re.ASCII)
    checkpoint = re.compile(names, re.ASCII)
    for name in sorted(os.listdir(parent)):
        with suppress(OSError):
            if temporary.fullmatch(name):
                _remove(parent / name)
            elif checkpoint.fullmatch(name):
                with locking(parent / name, wait=False) as directory:
                    _remove_temporaries(directory)


def _remove(path: Path) -> None:
    """Removes a temporary directory that no process has locked, or a link with its name."""
    if path.is_symlink():
        os.unlink(path)
        return
    with locking(path, wait=False) as directory:
        _remove_files(directory)
        os.rmdir(path)


def _remove_files(directory: int) -> None:
    for name in _names_in(directory)[0]:
        os.unlink(name, dir_fd=directory)


def _remove_temporaries(directory: int) -> None:
    for name in _names_in(directory)[0]:
        if name != FILE_NAME:
            with suppress(OSError):
                os.unlink(name, dir_fd=directory)


def _names_in(directory: int) -> tuple[list[str], list[str]]:
    """Returns the names of files that a checkpoint writes, and the foreign names, sorted."""
    names: tuple[list[str], list[str]] = ([], [])
    with os.scandir(directory) as entries:
        for entry in entries:
            is_written = _FILE.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
            names[0 if is_written else 1].append(entry.name)
    return sorted(names[0]), sorted(names[1])


def _temporary_name(name: str) -> str:
    # The token is not drawn from the generators that the training draws from.
    return f".{name}.tmp-{secrets.token_hex(8)}"


def make_directories(path: Path) -> None:
    """Creates a directory and its parents, and waits until their names are on the disk."""
    if path.is_dir():
        return
    make_directories(path.parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    _sync(path.parent)


@contextmanager
def locking(path: Path, *, wait: bool = True) -> Iterator[int]:
    """Yields a descriptor of a directory, locked against other processes until they end.

    With ``wait``, nothing is locked where directories cannot be locked, as on NFS.

    Raises:
        OSError: ``path`` is a link or a file; or ``wait`` is false, and another process has the
            lock, or there are no locks.
    """
    with _opening(path) as directory:
        if wait:
            with _ignore_unsupported():
                fcntl.flock(directory, fcntl.LOCK_EX)
        else:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield directory
        finally:
            # A child that was forked meanwhile shares the lock until either process releases it.
            with _ignore_unsupported():
                fcntl.flock(directory, fcntl.LOCK_UN)


@contextmanager
def _opening(path: Path) -> Iterator[int]:
    """Yields a descriptor of a directory; raises OSError if it is a link."""
    directory = os.open(path, _FLAGS)
    try:
        yield directory
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


def _sync(path: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    with _opening(Path(os.path.realpath(path))) as directory, _ignore_unsupported():
        os.fsync(directory)
