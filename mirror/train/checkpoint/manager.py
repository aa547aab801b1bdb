"""CheckpointManager: the newest checkpoints of a run, in one directory.

``describe_checkpoint`` and ``export_checkpoint`` are the commands of ``mirror checkpoint`` for
the checkpoints of such a directory: as text, and as a file for ``torch.load``.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import SupportsIndex

import torch

from mirror.base.migration_hints import call_with_hints
from mirror.base.process_bound import NoCopy
from mirror.errors import CheckpointError, short_repr
from mirror.threads.user_frames import warn_user
from mirror.train.checkpoint.checkpoint import Checkpoint, worker_agreement_of
from mirror.train.checkpoint.checkpoint_directory import (
    is_checkpoint,
    locking,
    make_directories,
    remove_checkpoint,
    remove_leftovers,
)
from mirror.train.checkpoint.checkpoint_file import Manifest
from mirror.train.checkpoint.snapshot import Contents, read_contents, read_manifest_of
from mirror.values import is_int

_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}([0-9]{{1,18}})", re.ASCII)


class SavedStep(int):
    """The number of a saved step; as a path, its checkpoint: ``restore(latest)``.

    Attributes:
        path: the directory of the checkpoint.
    """

    path: Path

    @classmethod
    def at_path(cls, step: int, path: Path) -> SavedStep:
        """Returns the step with its path."""
        saved = cls(step)
        saved.path = path
        return saved

    def __fspath__(self) -> str:
        return str(self.path)


@dataclass
class TrainProgress:
    """Counts steps, from the restored or saved number on.

    Attributes:
        done: the steps done.
        is_pending: whether another step has ended that is counted later, when the loop has done
            what belongs to it.
    """

    done: int = 0
    is_pending: bool = False

    def step(self) -> None:
        """Counts one step."""
        self.done += 1
        self.is_pending = False

    @property
    def number(self) -> int:
        """The number for a checkpoint of the steps done."""
        return self.done

    def count_from(self, number: int) -> None:
        """Counts from the number under which the program saved, if that is larger."""
        self.done = max(self.done, number - self.is_pending)


@call_with_hints
class CheckpointManager(NoCopy):
    """Saves a checkpoint under the number of steps that were done, and restores the newest.

    ::

        manager = mirror.CheckpointManager(checkpoint, "checkpoints", max_to_keep=3)
        step = manager.restore_latest() or 0
        ...
        manager.save(step)

    Several processes may have managers of one directory: they save one after the other.

    Attributes:
        checkpoint: the objects to save.
        directory: the directory of the checkpoints; their names are ``step-`` and a number.
        max_to_keep: the number of newest checkpoints to keep; ``None`` keeps all.
        progress: the number of steps done, if a handler or loop counts them.
    """

    _instead = "create one in the other process, with the same directory"

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
    ) -> None:
        """Takes the checkpoint, and the directory, which the first save creates.

        Raises:
            TypeError: ``checkpoint`` is not a Checkpoint.
            ValueError: ``max_to_keep`` is below 1.
        """
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                f"a manager takes a mirror.Checkpoint, got {short_repr(checkpoint)}; pass "
                "mirror.Checkpoint(model=model, optimizer=optimizer)"
            )
        if max_to_keep is not None and (not is_int(max_to_keep) or max_to_keep < 1):
            raise ValueError(
                "max_to_keep must be the number of checkpoints to keep, at least 1, or None for "
                f"all; got {short_repr(max_to_keep)}"
            )
        self.checkpoint = checkpoint
        self.directory = Path(os.path.abspath(directory))
        self.max_to_keep = max_to_keep
        self.progress = TrainProgress()

    @property
    def steps(self) -> tuple[SavedStep, ...]:
        """The saved steps, the oldest first, whole or damaged."""
        found = {}
        for name in os.listdir(self.directory) if self.directory.is_dir() else ():
            match = _NAME.fullmatch(name)
            if match and is_checkpoint(self.directory / name):
                found[int(match[1])] = self.directory / name
        return tuple(SavedStep.at_path(step, found[step]) for step in sorted(found))

    @property
    def latest(self) -> SavedStep | None:
        """The newest saved step, which is also a path for ``restore``; ``None`` without any."""
        steps = self.steps
        return steps[-1] if steps else None

    def save(self, step: SupportsIndex, *, wait: bool = True) -> SavedStep:
        """Saves under the number of a step, and removes the oldest checkpoints.

        Args:
            step: the number, from 0; a checkpoint with this number is replaced.
            wait: see ``Checkpoint.save``.

        Raises:
            CheckpointError: see ``Checkpoint.save``.
            TypeError, ValueError: the step is not a whole number, or is negative.
        """
        try:
            number = operator.index(step)
        except TypeError:
            raise TypeError(
                "a checkpoint is saved under the number of steps done, an int from 0; got step "
                f"{short_repr(step)}; pass int(step) for a count that is a float"
            ) from None
        if isinstance(step, bool) or not 0 <= number < 10**18:
            raise ValueError(
                "a checkpoint is saved under the number of steps done, from 0; got step "
                f"{short_repr(step)}"
            )
        path = self._path(number)
        self.checkpoint.save_step(
            path, number, wait=wait, write=lambda write: self._write(path, write)
        )
        self.progress.count_from(number)
        return SavedStep.at_path(number, path)

    def restore_latest(self) -> int | None:
        """Restores the newest whole checkpoint; returns its step, or ``None`` without any.

        Damaged checkpoints are skipped with a warning.

        Raises:
            CheckpointError: all are damaged; or the newest whole one has other objects.
        """
        workers = worker_agreement_of(self.checkpoint.objects)
        read: list[Contents] = []

        def newest() -> str:
            self.wait()
            found = self._read_newest()
            read.extend(found[:1])
            return found[0].path.name if found else ""

        name = workers.choose("CheckpointManager.restore_latest()", newest)
        if not name:
            return None
        step = int(name.removeprefix(_PREFIX))
        known = read[0] if read else None
        self.checkpoint.restore_contents(workers.read(self.directory / name, known))
        self.progress = TrainProgress(step)
        return step

    def _read_newest(self) -> list[Contents]:
        """Returns the newest whole checkpoint, or an empty list."""
        damaged: list[str] = []
        for step in reversed(self.steps):
            try:
                contents = read_contents(step.path)
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            for text in damaged:
                warn_user(f"step {int(step)} is restored: {text}")
            return [contents]
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.directory} is whole; {'; '.join(damaged)}; remove them "
                "to start from scratch"
            )
        return []

    def wait(self) -> None:
        """Waits for a save in flight; see ``Checkpoint.wait``."""
        self.checkpoint.wait()

    close = wait

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, path: Path, write: Callable[[], None]) -> None:
        try:
            make_directories(self.directory)
            with locking(Path(os.path.realpath(self.directory))):
                remove_leftovers(self.directory, _NAME.pattern)
                if path.is_symlink():  # to another run's checkpoint, which stays
                    os.unlink(path)
                write()
                self._remove_old(path)
        except OSError as error:
            raise CheckpointError(f"{path} could not be written ({error})") from error

    def _remove_old(self, written: Path) -> None:
        """Removes all but the newest checkpoints, and never the one just written."""
        if self.max_to_keep is None:
            return
        others = [step for step in self.steps if step.path != written]
        for step in others[: max(0, len(others) - self.max_to_keep + 1)]:
            with suppress(OSError):  # the next save tries again
                remove_checkpoint(step.path)

    def _path(self, step: int) -> Path:
        """Returns the directory of a step, saved or not."""
        for saved in self.steps:
            if saved == step:
                return saved.path
        return self.directory / f"{_PREFIX}{step:09d}"


def describe_checkpoint(path: str | os.PathLike[str], *, verify: bool = False) -> str:
    """Returns the step, the objects and the tensors of a checkpoint, one per line.

    Args:
        path: a checkpoint, or the directory of a manager for its newest checkpoint.
        verify: whether to read the tensors too, and compare their checksums.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = _checkpoint_at(path)
    manifest = read_contents(found).snapshot.manifest if verify else read_manifest_of(found)
    lines = [f"{found}", *_summary(manifest), "", *_table(manifest)]
    if verify:
        lines += ["", "every byte is as it was written"]
    return "\n".join(line if line.isprintable() else ascii(line) for line in lines)


def export_checkpoint(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
    """Writes the states of a checkpoint as one file for ``torch.load``: a dict by name.

    ``torch.load(to)["model"]`` is what ``model.load_state_dict`` takes. Like every file of
    ``torch.save``, it is a pickle; mirror does not read it.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the file exists.
    """
    contents = read_contents(_checkpoint_at(path))
    try:
        with open(to, "xb") as file:
            torch.save(contents.states, file)
    except FileExistsError:
        raise CheckpointError(f"{to} is there already; choose another name") from None
    except OSError as error:
        raise CheckpointError(f"{to} could not be written ({error})") from error


def _checkpoint_at(path: str | os.PathLike[str]) -> Path:
    found = Path(path)
    if not is_checkpoint(found) and found.is_dir():
        latest = CheckpointManager(Checkpoint(), found).latest
        if latest is not None:
            return latest.path
    return found


def _summary(manifest: Manifest) -> Iterator[str]:
    if manifest.step is not None:
        yield f"step {manifest.step}"
    at = manifest.written_by.get("at")
    if isinstance(at, (int, float)) and 0 <= at < 2**40:
        moment = datetime.fromtimestamp(at, timezone.utc)
        yield f"saved {moment:%Y-%m-%d %H:%M:%S} UTC with torch {manifest.written_by.get('torch')}"
    for name, saved in manifest.workers[0].objects.items():
        yield f"{name}: {saved.kind}, {saved.type_name}"
    num_bytes = sum(tensor.num_bytes for tensor in manifest.tensors)
    yield f"{len(manifest.tensors)} tensors of {num_bytes} bytes, {len(manifest.views)} more views"


def _table(manifest: Manifest) -> Iterator[str]:
    stored = {tensor.name: tensor for tensor in manifest.tensors}
    rows = [(t.name, t.dtype, t.shape, f"{t.num_bytes} bytes") for t in manifest.tensors]
    for name, view in manifest.views.items():
        base = stored[view.base]
        is_whole = math.prod(view.shape) == base.num_elements
        what = f"the same as {view.base}" if is_whole else f"a part of {view.base}"
        rows.append((name, base.dtype, view.shape, what))
    texts = [
        (name, str(dtype).removeprefix("torch."), "x".join(map(str, shape)) or "one", what)
        for name, dtype, shape, what in rows
    ]
    widths = [max((len(row[i]) for row in texts), default=0) for i in range(3)]
    for row in sorted(texts):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[3]])
