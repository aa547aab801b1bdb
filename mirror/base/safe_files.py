"""Files that no other process can spoil: replaced atomically, or in folders of this user only.

A cache lies at a known path: below the home directory, or in the folder for temporary files that
all users share. Another user could create the folder first, or replace one of its parents later.
So a folder is opened component by component, without following links, and every component is
checked through its descriptor. Only this user and the administrator can then replace the folder or
a parent, and its path stays valid.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_atomically(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yields a new file that replaces ``path`` if the block ends without an error.

    Until then, the file has a random name in the same folder, so that no link can be prepared
    there. Several processes may write at a time, each to its own file; the last one remains.

    Args:
        path: the file to replace or create; a link is replaced, not followed.
        mode: the permissions of the new file, less the process's umask.

    Raises:
        OSError: no file can be created there.
    """
    target = Path(path)
    scratch = target.with_name(f"{target.name[:200]}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(scratch, flags, mode)
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(scratch, target)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


# O_PATH (Linux) opens folders that this user may pass through but not list.
_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(path: str | os.PathLike[str], *, create: bool = False) -> Path:
    """Returns the path of a folder, without links, after checking it and all its parents.

    Args:
        create: whether a missing folder, and missing parents, are created, with mode 0700.

    Raises:
        OSError: it does not exist, or another user can change it or replace it. The message
            names the folder and the reason.
    """
    resolved = Path(os.path.realpath(path))
    descriptor = os.open(resolved.anchor, _FLAGS)
    try:
        for i, name in enumerate(resolved.parts[1:], 2):
            try:
                inner = os.open(name, _FLAGS, dir_fd=descriptor)
            except FileNotFoundError:
                if not create:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=descriptor)
                inner = os.open(name, _FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
            current = Path(*resolved.parts[:i])
            _check(current, os.fstat(descriptor), is_parent=current != resolved)
    finally:
        os.close(descriptor)
    return resolved


def read_private(file: Path) -> bytes:
    """Returns the content of a file in a folder of ``private_folder``.

    Raises:
        OSError: it does not exist, is a link, or another user can change it.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would block
    with open(os.open(file, flags), "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{file} is not a file")
        _check(file, status, is_parent=False)
        return opened.read()


def _check(path: Path, status: os.stat_result, *, is_parent: bool) -> None:
    """Raises PermissionError if another user than this and the administrator can write there."""
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user")
    # In a sticky folder, such as /tmp, another user cannot rename or remove this user's files.
    is_sticky = is_parent and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OTHERS_WRITE and not is_sticky:
        raise PermissionError(f"other users can write to {path}; chmod go-w {path}")
