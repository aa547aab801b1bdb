"""Atomic replacement of files: written completely, or not at all."""

from __future__ import annotations

import os
import secrets
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
