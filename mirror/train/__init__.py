"""Around a training loop: what a program does besides its steps."""

from typing import TYPE_CHECKING

from mirror.signposts import names_of
from mirror.train.loop.hook import Hook
from mirror.train.loop.plotting import LivePlot
from mirror.train.loop.saving import SaveEvery
from mirror.train.loop.showing import LogEvery, ProgressBar
from mirror.train.loop.state import TrainingState
from mirror.train.loop.stopping import StopAfter, StopAtStep, StopOnNan
from mirror.train.loop.training import Training
from mirror.train.loop.writing import CSVWriter, TensorBoardWriter

__all__ = [
    "CSVWriter",
    "Hook",
    "LivePlot",
    "LogEvery",
    "ProgressBar",
    "SaveEvery",
    "StopAfter",
    "StopAtStep",
    "StopOnNan",
    "TensorBoardWriter",
    "Training",
    "TrainingState",
]

if not TYPE_CHECKING:  # to which an unknown name is one
    __getattr__ = names_of("mirror.train")
