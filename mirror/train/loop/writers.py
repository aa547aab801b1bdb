"""Hooks that write logged values: a CSV table, TensorBoard events, a plot in a notebook."""

from __future__ import annotations

import csv
import io
import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mirror.base.safe_files import replace_atomically
from mirror.errors import StrategyError
from mirror.train.loop.hook import Hook, Interval, TrainingState, Value


class CSVWriter(Hook):
    """Writes a row of logged values to a CSV file, with one column per name.

    A resumed training continues the file after the rows of the restored steps.

    Args:
        path: the file; its folder is created.
        steps: writes after steps that are multiples of it.

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
        """Writes the header and the rows, and opens the file for appending.

        If the process is killed meanwhile, the file stays as it was.
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
    """Writes logged values as scalars for TensorBoard.

    It needs the package ``tensorboard``. Events of steps after the restored one are purged.

    Args:
        folder: the folder of the events.
        steps: writes after steps that are multiples of it.

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
    """Returns the rows of a table up to a step, without incomplete ones."""
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


_MAX_POINTS = 1000  # points of a line; more would not be visible


class LivePlot(Hook):
    """Plots values over the steps in a notebook, and updates the plot during the training.

    It needs the packages ``matplotlib`` and, unless ``to`` is given, ``IPython``.

    Args:
        names: the names of the values to plot; by default all logged values.
        seconds: the time between two plots; only then the host waits for a GPU.
        to: called with the figure of matplotlib instead; for example to write a file.

    Raises:
        ModuleNotFoundError: a package is not installed; raised when the training begins.
        StrategyError: the program does not run in a notebook; raised when the training begins.
        ValueError: ``seconds`` is not above 0.
    """

    chief_only = True

    def __init__(
        self, *names: str, seconds: float = 1.0, to: Callable[[Any], object] | None = None
    ) -> None:
        self._names, self._to = names, to
        self._every = Interval("LivePlot", None, seconds)
        self._lines: dict[str, Line] = {}
        self._figure: Any = None
        self._show: Callable[[Any], object] | None = None

    def begin(self, training: TrainingState) -> None:
        self._lines.clear()
        try:
            from matplotlib.figure import Figure

            self._show = self._to or _notebook()
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"LivePlot needs a package that is not installed ({error}); pip install "
                "matplotlib ipython, or take LogEvery, or CSVWriter",
                name=error.name,
            ) from error
        self._figure = Figure(figsize=(7.0, 3.2), layout="constrained")
        self._every.begin()

    def after_step(self, training: TrainingState) -> None:
        for name in training.names:
            if name in training.logged_now and (not self._names or name in self._names):
                line = self._lines.setdefault(name, Line())
                line.add(training.step, training.peek(name))
        if self._every.is_due(training.step):
            self._draw()

    def end(self, training: TrainingState, error: BaseException | None) -> None:
        if self._figure is not None and self._lines:
            self._draw()

    def _draw(self) -> None:
        self._figure.clear()
        axes = self._figure.add_subplot()
        for name, line in self._lines.items():
            axes.plot(*line.points(), label=name)
        if len(self._lines) > 1:
            axes.legend()
        axes.set(xlabel="step", ylabel="" if len(self._lines) > 1 else next(iter(self._lines), ""))
        axes.grid(alpha=0.3)
        assert self._show is not None
        self._show(self._figure)


class Line:
    """Values over steps."""

    def __init__(self) -> None:
        self._steps, self._values = array("d"), array("d")
        self._new: list[Value] = []

    def add(self, step: int, value: Value) -> None:
        """Adds a value; values on a GPU are read in batches."""
        self._steps.append(step)
        self._new.append(value)
        if len(self._new) >= _MAX_POINTS:
            self._refresh()

    def points(self) -> tuple[Sequence[float], Sequence[float]]:
        """Returns steps and values, averaged over neighbours if there are too many."""
        self._refresh()
        group = -(-len(self._steps) // _MAX_POINTS)
        begins = range(0, len(self._steps), group)
        xs, ys = (
            [fmean(all_of[i : i + group]) for i in begins]
            for all_of in (self._steps, self._values)
        )
        return xs, ys

    def _refresh(self) -> None:
        self._values.extend(map(float, self._new))
        self._new.clear()


def _notebook() -> Callable[[Any], object]:
    """Returns a function that shows a figure below the cell, and replaces the previous one.

    It shows a PNG: whether a notebook shows figures depends on its settings.
    """
    from IPython import get_ipython
    from IPython.display import DisplayHandle, Image

    if getattr(get_ipython(), "kernel", None) is None:
        raise StrategyError(
            "LivePlot draws in a notebook, and this program runs in none; take LogEvery, "
            "ProgressBar or CSVWriter, or LivePlot(to=function) to show the figure yourself"
        )
    handle: Any = None

    def show(figure: Any) -> None:
        nonlocal handle
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=90)
        picture = Image(file.getvalue(), format="png")
        if handle is None:
            handle = DisplayHandle()
            handle.display(picture)
        else:
            handle.update(picture)

    return show
