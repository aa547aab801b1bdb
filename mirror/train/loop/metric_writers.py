"""Hooks that write what a training logs: a table in a file, and TensorBoard's events."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

from mirror.base.atomic_file import replace_atomically
from mirror.train.loop.hook import Hook, Interval
from mirror.train.loop.training_state import TrainingState


class CSVWriter(Hook):
    """Writes a row of what was logged to a file, with a column per name.

    A training that goes on goes on with the file, after the rows of the steps it has restored.

    Args:
        path: of the file; its folder is made.
        steps: after steps that are multiples of it.

    Raises:
        ValueError: ``steps`` is below 1.
    """

    chief_only = True

    def __init__(self, path: str | os.PathLike[str], steps: int = 1) -> None:
        self._path = Path(path)
        self._every = Interval("CSVWriter", steps, None)
        self._names: list[str] = []
        self._file: Any = None

    def begin(self, training: TrainingState) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = _rows(self._path, training.step)
        self._names = list(rows[0])[1:] if rows else []
        self._rewrite(rows)

    def after_step(self, training: TrainingState) -> None:
        names = [name for name in training.names if name in training.logged_now]
        if not names or not self._every.is_due(training.step):
            return
        new = [name for name in names if name not in self._names]
        if new:
            self._file.close()
            rows = _rows(self._path, training.step)
            self._names += new
            self._rewrite(rows)
        values = [repr(training.value(n)) if n in names else "" for n in self._names]
        csv.writer(self._file).writerow([training.step, *values])
        self._file.flush()

    def end(self, training: TrainingState, error: BaseException | None) -> None:
        if self._file is not None:
            self._file.close()

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Writes the head and the rows there are, and stays at the end of the file.

        Whoever ends the process meanwhile leaves the file as it was.
        """
        with (
            replace_atomically(self._path) as file,
            io.TextIOWrapper(file, "utf-8", newline="") as text,
        ):
            if self._names:
                writer = csv.writer(text)
                writer.writerow(["step", *self._names])
                kept = ([row["step"], *(row.get(n, "") for n in self._names)] for row in rows)
                writer.writerows(kept)
        self._file = self._path.open("a", encoding="utf-8", newline="")


class TensorBoardWriter(Hook):
    """Writes what was logged as scalars, which TensorBoard shows.

    Takes the package ``tensorboard``. What was written of steps after the one that is restored is
    purged.

    Args:
        folder: of the events.
        steps: after steps that are multiples of it.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: ``steps`` is below 1.
    """

    chief_only = True

    def __init__(self, folder: str | os.PathLike[str], steps: int = 100) -> None:
        self._folder = Path(folder)
        self._every = Interval("TensorBoardWriter", steps, None)
        self._writer: Any = None

    def begin(self, training: TrainingState) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"TensorBoardWriter needs a package that is not installed ({error}); pip install "
                "tensorboard, or take CSVWriter",
                name=error.name,
            ) from error
        purged = training.step + 1 if training.step else None
        self._writer = SummaryWriter(str(self._folder), purge_step=purged)

    def after_step(self, training: TrainingState) -> None:
        if self._every.is_due(training.step):
            for name in sorted(training.logged_now):
                self._writer.add_scalar(name, training.value(name), training.step)

    def end(self, training: TrainingState, error: BaseException | None) -> None:
        if self._writer is not None:
            self._writer.close()


def _rows(path: Path, last_step: int) -> list[dict[str, str]]:
    """Returns the rows of a table up to a step; one that was not written whole is left out."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        row
        for row in rows
        if (row.get("step") or "").isdecimal()
        and int(row["step"]) <= last_step
        and None not in row.values()
    ]
