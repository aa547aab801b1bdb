"""The progress bar: one line on a terminal, which is removed at the end; else nothing."""

import io

import pytest

from mirror.train.loop.hooks import ProgressLine


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
def test_the_line_is_cleared_whatever_happens(error):
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
        assert progress.due()
        progress.show(1, "")
        assert not progress.due()


def test_without_a_terminal_nothing_is_written():
    stream = io.StringIO()
    with ProgressLine("epoch 1", 8, stream) as progress:
        assert not progress.due()
        progress.show(2, "loss 0.5")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("variable", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_a_terminal_that_nobody_watches_counts_as_none(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    terminal = Terminal()
    with ProgressLine("epoch 1", 8, terminal) as progress:
        progress.show(2, "loss 0.5")
    assert terminal.getvalue() == ""
