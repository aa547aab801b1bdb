"""A disk that fails: what a save calls of ``os``, refused from some call on, or only once.

[Note: Power loss]
A killed process loses nothing that it has written. A machine without power loses what was not
synced: the content of files since their last fsync, and the names in a directory since that of the
directory. ``lose`` undoes these, all of them or some.
"""

import os
import random
from pathlib import Path

from mirror.train.checkpoint import checkpoint_directory, checkpoint_file

COUNTED = (
    "open",
    "write",
    "fsync",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
    "listdir",
    "scandir",
)


class Died(BaseException):
    """The process is gone: what it would do next does not happen."""


class Disk:
    """Stands for the module ``os`` in what saves.

    Args:
        at: the number of the call at which it fails; None counts only.
        error: an errno, that one call raises; None: the process dies.

    Attributes:
        calls: how many there were.
    """

    def __init__(self, at=None, error=None):
        self.at, self.error = at, error
        self.calls = 0
        self.is_dead = False
        self._undo = []  # (directory or file, how), oldest first
        self._paths = {}  # of open files
        for name in COUNTED:
            setattr(self, name, self._counted(name))

    def __getattr__(self, name):
        return getattr(os, name)

    def __enter__(self):
        checkpoint_directory.os = checkpoint_file.os = self
        return self

    def __exit__(self, *exception):
        checkpoint_directory.os = checkpoint_file.os = os

    def _counted(self, name):
        def call(*args, **kwargs):
            if self.is_dead:
                raise Died
            self.calls += 1
            if self.calls - 1 == self.at:
                if name == "write":  # half of it was done
                    self._write(args[0], args[1][: len(args[1]) // 2])
                if self.error is None:
                    self.is_dead = True
                    raise Died
                raise OSError(self.error, os.strerror(self.error))
            return getattr(self, f"_{name}", getattr(os, name))(*args, **kwargs)

        return call

    def _path(self, name, directory=None):
        return Path(name) if directory is None else self._paths[directory] / name

    def _open(self, name, flags, *mode, dir_fd=None):
        file = os.open(name, flags, *mode, dir_fd=dir_fd)
        path = self._paths[file] = self._path(name, dir_fd)
        if flags & os.O_CREAT:
            self._record(path.parent, lambda: path.unlink(missing_ok=True))
        return file

    def _write(self, file, data):
        path = self._paths[file]
        self._record(path, lambda: path.exists() and os.truncate(path, 0))
        return os.write(file, data)

    def _fsync(self, file):
        synced = self._paths[file]
        self._undo = [(path, how) for path, how in self._undo if path != synced]

    def _mkdir(self, path):
        os.mkdir(path)
        self._record(Path(path).parent, lambda: _remove(Path(path)))

    def _rename(self, old, new):
        os.rename(old, new)
        for file, path in self._paths.items():
            if path == Path(old):
                self._paths[file] = Path(new)
        self._record(Path(new).parent, lambda: Path(new).exists() and os.rename(new, old))

    def _replace(self, old, new, *, src_dir_fd, dst_dir_fd):
        path = self._path(new, dst_dir_fd)
        before = path.read_bytes() if path.exists() else None
        os.replace(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self._record(path.parent, lambda: before and path.write_bytes(before))

    def _unlink(self, name, dir_fd=None):
        path = self._path(name, dir_fd)
        content = path.read_bytes()
        os.unlink(name, dir_fd=dir_fd)
        parent = path.parent
        self._record(parent, lambda: parent.exists() and path.write_bytes(content))

    def _rmdir(self, path):
        os.rmdir(path)
        self._record(Path(path).parent, lambda: Path(path).mkdir(exist_ok=True))

    def _record(self, path, how):
        self._undo.append((path, how))

    def lose(self, share=1.0, seed=0):
        """Takes the power away: what was not synced is undone, or a share of it."""
        draw = random.Random(seed).random
        for _, how in reversed(self._undo):
            if draw() < share:
                how()
        self._undo = []


def _remove(directory):
    for path in directory.iterdir() if directory.is_dir() else ():
        path.unlink()
    if directory.is_dir():
        directory.rmdir()
