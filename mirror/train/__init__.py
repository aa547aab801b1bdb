"""Training loops: hooks, progress, logs, stopping and saving."""

from typing import TYPE_CHECKING

from mirror.base.migration_hints import names_of
from mirror.train.checkpoint.preemption import TerminationConfig
from mirror.train.loop.hook import Hook, TrainingState
from mirror.train.loop.hooks import (
    LogEvery,
    ProgressBar,
    SaveEvery,
    StopAfter,
    StopAtStep,
    StopOnNan,
)
from mirror.train.loop.training import Training
from mirror.train.loop.writers import CSVWriter, LivePlot, TensorBoardWriter

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

if not TYPE_CHECKING:  # so that the type checker reports unknown names
    __getattr__ = names_of("mirror.train")
