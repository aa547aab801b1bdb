"""What hooks show: lines with values and the pace, and bars."""

import functools
import io
import re
import sys
import threading
from types import SimpleNamespace

import pytest

import mirror
from mirror.train import LogEvery, ProgressBar, StopAtStep, Training
from mirror.train.loop import progress_hooks


def train(*hooks, num_batches=9):
    with Training(mirror.MirroredStrategy(["cpu"] * 2), hooks=hooks) as training:
        for _ in training.batches(range(num_batches)):
            training.log(loss=training.step / 3)


def test_lines_tell_values_and_the_pace():
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
    monkeypatch.setattr(progress_hooks.time, "perf_counter", lambda: now[0])
    pace = progress_hooks.StepRate()
    training = SimpleNamespace(step=100, seconds_waiting=1.0)
    now[0] = 15.0
    assert pace.since(training) == (20.0, 0.2)
    now[0], training.step, training.seconds_waiting = 17.0, 103, 2.0
    assert pace.since(training) == (1.5, 0.5)


@pytest.mark.parametrize(("hooks", "total"), [((), 9), ((StopAtStep(4),), 4)])
def test_tqdm_is_told_every_step(monkeypatch, hooks, total):
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
    monkeypatch.setattr(progress_hooks.Interval, "is_due", lambda self, step: True)
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
