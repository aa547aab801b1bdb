"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_atomically(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[BinaryIO]:
    """Gives a new file, which takes the place of ``path`` if the block ends without an error.

    Until then it lies beside it under a name that nobody can guess, and that no link lies in wait
    at. Several processes may do this at a time; each has its own file, and the last one stays.

    Args:
        path: what to replace, or to make; a link is replaced, not followed.
        mode: of the new file, less the process's umask.

    Raises:
        OSError: no file can be made there.
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
