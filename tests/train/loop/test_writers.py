"""What a training shows: live plots, a message where no plot is possible, a progress line."""

import io
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import mirror
from mirror.train import LivePlot, StopAtStep, Training
from mirror.train.loop.hooks import ProgressLine
from mirror.train.loop.writers import Line

pytest.importorskip("matplotlib")


def train(*hooks, num_steps=5, **values):
    with Training(mirror.MirroredStrategy(["cpu"] * 2), hooks=hooks) as training:
        for i in training.batches(range(num_steps)):
            training.log(**{name: value(i) for name, value in values.items()})


def drawn(figure):
    """Returns the points of each line, and what the axes are called."""
    (axes,) = figure.axes
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}
    return lines, (axes.get_xlabel(), axes.get_ylabel(), axes.get_legend() is not None)


def test_every_step_is_a_point_of_the_plot():
    figures = []
    hook = LivePlot(seconds=1e-9, to=lambda figure: figures.append(drawn(figure)))
    train(hook, loss=lambda i: torch.tensor([i / 2.0]))
    points = [(i + 1, i / 2) for i in range(5)]
    assert figures[:5] == [({"loss": points[:n]}, ("step", "loss", False)) for n in range(1, 6)]
    assert figures[5:] == figures[4:5]  # at the end, with what came since


def test_what_was_logged_is_drawn_at_the_end_also_after_an_error():
    figures = []

    def fails(i):
        if i == 3:
            raise ZeroDivisionError
        return float(i)

    with pytest.raises(ZeroDivisionError):
        train(LivePlot(seconds=1e6, to=figures.append), loss=fails)
    (figure,) = figures
    assert drawn(figure)[0] == {"loss": [(1, 0), (2, 1), (3, 2)]}


def test_lines_are_those_asked_for():
    figures = []
    values = {"loss": float, "rate": lambda i: 0.1, "accuracy": lambda i: i / 5}
    train(LivePlot("accuracy", "loss", seconds=1e6, to=figures.append), **values)
    lines, names = drawn(figures[-1])
    assert set(lines) == {"loss", "accuracy"}
    assert names == ("step", "", True)


def test_a_training_that_logs_nothing_draws_nothing():
    figures = []
    train(LivePlot(to=figures.append))
    assert figures == []


def test_a_training_that_goes_on_draws_from_its_step_on():
    class FirstStep(mirror.train.Hook):
        def begin(self, training):
            training.step = 100

    figures = []
    train(FirstStep(), LivePlot(to=figures.append), StopAtStep(num_steps=2), loss=float)
    assert drawn(figures[-1])[0] == {"loss": [(101, 0), (102, 1)]}


def test_of_many_values_neighbours_are_drawn_as_their_mean():
    line = Line()
    for step in range(1, 2501):
        line.add(step, torch.tensor(float(step)) if step % 2 else float(step))
    xs, ys = line.points()
    assert xs == ys
    assert xs[:2] == [2, 5]
    assert xs[-1] == 2500
    assert len(xs) == 834


class Displayed:
    """What stands for IPython: a kernel, if it runs in a notebook, and what is displayed."""

    def __init__(self, monkeypatch, *, in_notebook):
        self.done = done = []

        class Handle:
            def display(self, picture):
                done.append(("display", picture))

            def update(self, picture):
                done.append(("update", picture))

        shell = SimpleNamespace(kernel=object()) if in_notebook else SimpleNamespace()
        package, display = ModuleType("IPython"), ModuleType("IPython.display")
        package.get_ipython = lambda: shell
        package.version_info = (9, 0)  # matplotlib asks
        display.DisplayHandle = Handle
        display.Image = lambda data, **options: (options["format"], data[1:4])
        monkeypatch.setitem(sys.modules, "IPython", package)
        monkeypatch.setitem(sys.modules, "IPython.display", display)


def test_a_notebook_shows_one_picture_which_changes(monkeypatch):
    shown = Displayed(monkeypatch, in_notebook=True)
    train(LivePlot(seconds=1e-9), num_steps=3, loss=float)
    assert [how for how, _ in shown.done] == ["display", "update", "update", "update"]
    assert {picture for _, picture in shown.done} == {("png", b"PNG")}


def test_where_there_is_no_notebook_the_training_does_not_begin(monkeypatch):
    Displayed(monkeypatch, in_notebook=False)
    with pytest.raises(mirror.StrategyError, match="runs in none; take LogEvery"):
        train(LivePlot(), loss=pytest.fail)


@pytest.mark.parametrize("name", ["IPython", "matplotlib.figure"])
def test_without_a_package_the_training_does_not_begin(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib ipython, or take"):
        train(LivePlot(), loss=pytest.fail)


def test_drawing_takes_time_and_is_not_done_at_all_times():
    with pytest.raises(ValueError, match="above 0"):
        LivePlot(seconds=0)


# The progress line: one line on a terminal, which is removed at the end


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def test_a_terminal_shows_what_is_done():
    terminal = Terminal()
    with ProgressLine("epoch 1", 8, terminal) as progress:
        progress.show(2, "loss 0.5")
        assert terminal.getvalue() == "\r\x1b[Kepoch 1 [######------------------] loss 0.5"


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_the_line_is_cleared_at_the_end_and_after_an_error(error):
    terminal = Terminal()
    try:
        with ProgressLine("epoch 1", 8, terminal) as progress:
            progress.show(8, "loss 0.5")
            if error:
                raise error
    except (KeyboardInterrupt, ValueError):
        pass
    assert terminal.getvalue().endswith("loss 0.5\r\x1b[K")


def test_the_line_is_cleared_when_ctrl_c_comes_right_after_it_was_written():
    class Interrupted(Terminal):
        def flush(self):
            if self.getvalue().endswith("loss 0.5"):
                raise KeyboardInterrupt

    terminal = Interrupted()
    with pytest.raises(KeyboardInterrupt), ProgressLine("epoch 1", 8, terminal) as progress:
        progress.show(8, "loss 0.5")
    assert terminal.getvalue().endswith("loss 0.5\r\x1b[K")


def test_the_line_never_wraps(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    with ProgressLine("epoch 1", 8, terminal) as progress:
        progress.show(2, "loss 0.5")
        assert terminal.getvalue() == "\r\x1b[Kepoch 1 [######----"


def test_redrawing_is_due_at_first_and_then_not_at_once():
    with ProgressLine("epoch 1", 8, Terminal()) as progress:
        assert progress.is_due()
        progress.show(1, "")
        assert not progress.is_due()


def test_without_a_terminal_nothing_is_written():
    stream = io.StringIO()
    with ProgressLine("epoch 1", 8, stream) as progress:
        assert not progress.is_due()
        progress.show(2, "loss 0.5")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("variable", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_a_dumb_or_ci_terminal_counts_as_none(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    terminal = Terminal()
    with ProgressLine("epoch 1", 8, terminal) as progress:
        progress.show(2, "loss 0.5")
    assert terminal.getvalue() == ""
