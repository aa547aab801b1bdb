"""What hooks write: tables that go on as if nothing had been, and TensorBoard's events."""

import csv
import sys

import pytest

import mirror
from mirror.train import CSVWriter, Hook, StopAtStep, TensorBoardWriter, Training


class FirstStep(Hook):
    """Has a training begin at a step, as if a checkpoint had been restored."""

    def __init__(self, step):
        self.step = step

    def begin(self, training):
        training.step = self.step


def train(path, num_steps, first=0, *, names=("loss",), steps=1):
    hooks = [FirstStep(first), CSVWriter(path, steps), StopAtStep(num_steps=num_steps)]
    with Training(mirror.MirroredStrategy(["cpu"]), hooks=hooks) as training:
        for i in training.batches(range(1000)):
            training.log(**dict.fromkeys(names[: 1 + i], training.step / 3))


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_a_table_has_a_row_per_step(tmp_path):
    train(tmp_path / "new" / "log.csv", 3)
    assert rows(tmp_path / "new" / "log.csv") == [
        ["step", "loss"],
        *([str(step), repr((step - 1) / 3)] for step in (1, 2, 3)),
    ]


def test_a_table_that_goes_on_is_as_if_nothing_had_been(tmp_path):
    train(tmp_path / "whole.csv", 9)
    train(tmp_path / "log.csv", 6)
    with (tmp_path / "log.csv").open("a") as file:
        file.write("7,0.")  # what a process that was killed may leave
    train(tmp_path / "log.csv", 5, first=4)
    assert rows(tmp_path / "log.csv") == rows(tmp_path / "whole.csv")


def test_names_that_come_later_get_columns(tmp_path):
    train(tmp_path / "log.csv", 3, names=("loss", "accuracy", "rate"))
    assert rows(tmp_path / "log.csv") == [
        ["step", "loss", "accuracy", "rate"],
        ["1", "0.0", "", ""],
        ["2", repr(1 / 3), repr(1 / 3), ""],
        ["3", *[repr(2 / 3)] * 3],
    ]


def test_not_every_step_has_to_be_written(tmp_path):
    train(tmp_path / "log.csv", 9, steps=4)
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
    train(tmp_path / "log.csv", 3)
    before = (tmp_path / "log.csv").read_bytes()
    monkeypatch.setattr(csv, "writer", lambda file: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "log.csv", 6, first=3)
    assert (tmp_path / "log.csv").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]
