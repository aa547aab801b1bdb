"""A hook that draws what a training logs in a notebook, while it trains."""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from mirror.errors import StrategyError
from mirror.train.loop.hook import Hook, Interval
from mirror.train.loop.training_state import TrainingState, Value

_MANY = 1000  # points of a line; of more no one sees


class LivePlot(Hook):
    """Draws values over the steps in a notebook, and draws them anew as the training goes on.

    Takes the packages ``matplotlib`` and, unless ``to`` is given, ``IPython``.

    Args:
        names: of the values to draw, a line each; without any, all that are logged.
        seconds: between two drawings; only then the host waits for a GPU.
        to: is called with matplotlib's figure instead; one that writes a file, for instance.

    Raises:
        ModuleNotFoundError: a package is not installed; raised when the training begins.
        StrategyError: there is no notebook; raised when the training begins.
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
                line.add(training.step, training.value_there(name))
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
        """Adds a value, which may be on a GPU still: it is looked at with many others."""
        self._steps.append(step)
        self._new.append(value)
        if len(self._new) >= _MANY:
            self._refresh()

    def points(self) -> tuple[Sequence[float], Sequence[float]]:
        """Returns steps and values; where there are too many, means of neighbours."""
        self._refresh()
        group = -(-len(self._steps) // _MANY)
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
    """Returns what shows a figure below the cell, in the place of the one before.

    As a picture that is drawn here: whether a notebook knows figures depends on its settings.
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
