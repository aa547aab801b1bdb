"""Training loops: hooks, progress, logs, stopping and saving; elastic workers."""

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
    "elastic",
]

if TYPE_CHECKING:
    from mirror.train import elastic
else:  # hidden from type checkers, which must report unknown names
    __getattr__ = names_of("mirror.train", lazy={"elastic": "mirror.train.elastic"})
