"""The output of hooks: lines with values, bars, tables, TensorBoard's events."""

import csv
import functools
import io
import re
import sys
import threading
from types import SimpleNamespace

import pytest

import mirror
from mirror.train import (
    CSVWriter,
    Hook,
    LogEvery,
    ProgressBar,
    StopAtStep,
    TensorBoardWriter,
    Training,
)
from mirror.train.loop import hooks as module


def train(*hooks, num_batches=9):
    with Training(mirror.MirroredStrategy(["cpu"] * 2), hooks=hooks) as training:
        for _ in training.batches(range(num_batches)):
            training.log(loss=training.step / 3)


def test_lines_show_values_and_steps_per_second():
    lines = []
    train(LogEvery(4, to=lines.append))
    assert len(lines) == 2
    for step, line in zip((4, 8), lines, strict=True):
        loss = f"{(step - 1) / 3:.4g}"
        pattern = rf"step {step}: loss {loss}, [\d.e+]+ steps/s, \d+ % waiting for input"
        assert re.fullmatch(pattern, line)


def test_lines_are_printed(capsys):
    train(LogEvery(seconds=1e-9), num_batches=1)
    assert capsys.readouterr().out.startswith("step 1: loss 0, ")


def test_the_pace_is_that_since_the_last_look(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    pace = module.StepRate()
    training = SimpleNamespace(step=100, seconds_waiting=1.0)
    now[0] = 15.0
    assert pace.measure(training) == (20.0, 0.2)
    now[0], training.step, training.seconds_waiting = 17.0, 103, 2.0
    assert pace.measure(training) == (1.5, 0.5)


@pytest.mark.parametrize(("hooks", "total"), [((), 9), ((StopAtStep(4),), 4)])
def test_tqdm_is_updated_in_every_step(monkeypatch, hooks, total):
    told = []

    class Bar:
        def __init__(self, total, initial, **options):
            self.n = initial
            told.append((total, initial))

        def set_postfix_str(self, text, refresh):
            told.append(text)

        def update(self, number):
            self.n += number

        def close(self):
            told.append(self.n)

    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))
    monkeypatch.setattr(module.Interval, "is_due", lambda self, step: True)
    train(*hooks, ProgressBar())
    assert (told[0], told[-1]) == ((total, 0), total)
    assert re.fullmatch(r"loss 0, input \d+%, 2 replicas", told[1])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_without_tqdm_rich_shows_the_bar(monkeypatch, is_terminal):
    console = pytest.importorskip("rich.console")
    progress = pytest.importorskip("rich.progress")
    out = io.StringIO()
    made = functools.partial(
        progress.Progress,
        console=console.Console(file=out, force_terminal=is_terminal, width=120, _environ={}),
    )
    kinds = SimpleNamespace(**{**vars(progress), "Progress": made})
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setitem(sys.modules, "rich.progress", kinds)
    before = threading.active_count()
    train(ProgressBar(), StopAtStep(4))
    assert threading.active_count() == before
    shown = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", out.getvalue())
    assert re.search(r"4/4 [\d.e+]+ steps/s, \d+:\d\d left, loss 0, input \d+%, 2 repl", shown)


def test_without_either_there_is_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    train(ProgressBar())
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    assert re.search(
        r"training \[#*-*\] 1/9, [\d.e+]+ steps/s, \d+:\d\d left, loss 0", terminal.getvalue()
    )
    assert terminal.getvalue().endswith("\r\x1b[K")


class FirstStep(Hook):
    """Has a training begin at a step, as if a checkpoint had been restored."""

    def __init__(self, step):
        self.step = step

    def begin(self, training):
        training.step = self.step


def train_writing(path, num_steps, first=0, *, names=("loss",), steps=1):
    hooks = [FirstStep(first), CSVWriter(path, steps), StopAtStep(num_steps=num_steps)]
    with Training(mirror.MirroredStrategy(["cpu"]), hooks=hooks) as training:
        for i in training.batches(range(1000)):
            training.log(**dict.fromkeys(names[: 1 + i], training.step / 3))


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_a_table_has_a_row_per_step(tmp_path):
    train_writing(tmp_path / "new" / "log.csv", 3)
    assert rows(tmp_path / "new" / "log.csv") == [
        ["step", "loss"],
        *([str(step), repr((step - 1) / 3)] for step in (1, 2, 3)),
    ]


def test_a_table_that_goes_on_is_as_if_nothing_had_been(tmp_path):
    train_writing(tmp_path / "whole.csv", 9)
    train_writing(tmp_path / "log.csv", 6)
    with (tmp_path / "log.csv").open("a") as file:
        file.write("7,0.")  # what a process that was killed may leave
    train_writing(tmp_path / "log.csv", 5, first=4)
    assert rows(tmp_path / "log.csv") == rows(tmp_path / "whole.csv")


def test_names_that_come_later_get_columns(tmp_path):
    train_writing(tmp_path / "log.csv", 3, names=("loss", "accuracy", "rate"))
    assert rows(tmp_path / "log.csv") == [
        ["step", "loss", "accuracy", "rate"],
        ["1", "0.0", "", ""],
        ["2", repr(1 / 3), repr(1 / 3), ""],
        ["3", *[repr(2 / 3)] * 3],
    ]


def test_not_every_step_has_to_be_written(tmp_path):
    train_writing(tmp_path / "log.csv", 9, steps=4)
    assert [row[0] for row in rows(tmp_path / "log.csv")] == ["step", "4", "8"]


def test_without_tensorboard_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    training = Training(mirror.MirroredStrategy(["cpu"]), hooks=[TensorBoardWriter(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        training.__enter__()


def test_tensorboard_has_the_scalars(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, num_steps in ((0, 6), (4, 4)):
        hooks = [FirstStep(first), TensorBoardWriter(tmp_path, 2), StopAtStep(num_steps=num_steps)]
        with Training(mirror.MirroredStrategy(["cpu"]), hooks=hooks) as training:
            for _ in training.batches(range(100)):
                training.log(loss=training.step + 0.5)
    events = reading.EventAccumulator(str(tmp_path)).Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("loss")]
    assert scalars == [(2, 1.5), (4, 3.5), (6, 5.5), (8, 7.5)]


def test_a_table_that_cannot_be_rewritten_stays_as_it_was(tmp_path, monkeypatch):
    # It was emptied first, and what ended the process then took all rows with it.
    train_writing(tmp_path / "log.csv", 3)
    before = (tmp_path / "log.csv").read_bytes()
    monkeypatch.setattr(csv, "writer", lambda file: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_writing(tmp_path / "log.csv", 6, first=3)
    assert (tmp_path / "log.csv").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]
