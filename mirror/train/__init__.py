"""Around a training loop: what a program does besides its steps."""

from typing import TYPE_CHECKING

from mirror.base.migration_hints import names_of
from mirror.train.checkpoint.termination_config import TerminationConfig
from mirror.train.loop.hook import Hook
from mirror.train.loop.hooks import SaveEvery, StopAfter, StopAtStep, StopOnNan
from mirror.train.loop.live_plot import LivePlot
from mirror.train.loop.metric_writers import CSVWriter, TensorBoardWriter
from mirror.train.loop.progress_hooks import LogEvery, ProgressBar
from mirror.train.loop.training import Training
from mirror.train.loop.training_state import TrainingState

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
    "TerminationConfig",
    "Training",
    "TrainingState",
]

if not TYPE_CHECKING:  # to which an unknown name is one
    __getattr__ = names_of("mirror.train")
