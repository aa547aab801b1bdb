"""The exceptions mirror raises; each message says the rule, what came, and what to do.

``short_repr`` puts what came in words: short, and never the data in it.

MirrorError
    DeviceError(ValueError)               a device does not exist, or devices do not go together
    BackendError(RuntimeError)            an unknown backend, or one that cannot serve the devices
    StrategyError(RuntimeError)           a call at the wrong time or in the wrong context
        CompileError                      a step does what no compiled step can do
        StepError(TypeError)              a step cannot be sent to a worker
    StructureError(ValueError)            nested values of replicas differ in structure
    BatchError(ValueError)                the leaves of a batch do not fit together
    ShapeError(ValueError)                tensors of one collective differ in shape or dtype
    DivergenceError(RuntimeError)         replicas did not reach the same merge points
    CollectiveTimeoutError(TimeoutError)  a collective or a replica took too long
    NanLossError(ArithmeticError)         what a training has logged is NaN or infinite
    ReplicaMismatchError(RuntimeError)    variables that must be equal have different bits
    GradientError(ArithmeticError)        a gradient is NaN or infinite
    CheckpointError(RuntimeError)         a checkpoint is missing, damaged or foreign
    RecordError(ValueError)               a record is damaged, or does not hold what it should
    WorkerLostError(RuntimeError)         a worker, another process of the training, is gone
    ServerLostError(RuntimeError)         a parameter server is gone, with what it held
    ActorDied(RuntimeError)               the process of an actor, a server or a worker, has ended
    RemoteError(RuntimeError)             an actor's method has raised
    WireError(RuntimeError)               something from a connection is no message, or cannot go
    ClusterError(ValueError, RuntimeError)  what is said of the cluster is wrong, or missing
        ClusterTypeError(TypeError)       or of another type
"""

from __future__ import annotations

import numbers
from enum import Enum

import numpy as np
import torch

__all__ = [
    "ActorDied",
    "BackendError",
    "BatchError",
    "CheckpointError",
    "ClusterError",
    "ClusterTypeError",
    "CollectiveTimeoutError",
    "CompileError",
    "DeviceError",
    "DivergenceError",
    "GradientError",
    "MirrorError",
    "NanLossError",
    "RecordError",
    "RemoteError",
    "ReplicaMismatchError",
    "ServerLostError",
    "ShapeError",
    "StepError",
    "StrategyError",
    "StructureError",
    "WireError",
    "WorkerLostError",
]

_MAX_LENGTH = 60
_PLAIN = (str, bytes, numbers.Number, Enum, torch.dtype, torch.device, type, type(None))
_CONTAINERS = (tuple, list, set, frozenset, dict)


class MirrorError(Exception):
    """Base of every exception that mirror defines."""


class DeviceError(MirrorError, ValueError):
    """A device does not exist, is not visible, or does not go with the others."""


class BackendError(MirrorError, RuntimeError):
    """A communication backend is unknown or cannot serve these devices; carries the reason."""


class StrategyError(MirrorError, RuntimeError):
    """Something was called at a time or in a context where it has no meaning."""


class CompileError(StrategyError):
    """A step does what no trace of it can follow; names the line."""


class StepError(StrategyError, TypeError):
    """A step that was scheduled holds what cannot be sent to a worker; names it."""


class StructureError(MirrorError, ValueError):
    """Nested values that must have one structure on all replicas do not."""


class BatchError(MirrorError, ValueError):
    """The leaves of a batch cannot be split together."""


class ShapeError(MirrorError, ValueError):
    """Tensors of one collective differ in shape or dtype, overlap, or are not contiguous."""


class DivergenceError(MirrorError, RuntimeError):
    """Replicas did not all reach the same merge point."""


class CollectiveTimeoutError(MirrorError, TimeoutError):
    """A collective, or a replica that others wait for, took longer than the timeout."""


class GradientError(MirrorError, ArithmeticError):
    """A replica's gradient has elements that are NaN or infinite."""


class NanLossError(MirrorError, ArithmeticError):
    """What a training has logged, its loss as a rule, is NaN or infinite."""


class ReplicaMismatchError(MirrorError, RuntimeError):
    """A variable or an optimizer state that must be equal on all replicas is not."""


class CheckpointError(MirrorError, RuntimeError):
    """A checkpoint is missing, damaged, or was written for something else."""


class WorkerLostError(MirrorError, RuntimeError):
    """Another process of the training is gone, or has not moved for the timeout."""


class ServerLostError(MirrorError, RuntimeError):
    """A parameter server is gone, and with it the values and optimizer states it had."""


class ActorDied(MirrorError, RuntimeError):
    """The process of an actor, a parameter server or a worker, has ended, or was never there.

    Attributes:
        name: the actor's.
    """

    def __init__(self, name: str, what: str = "its process has ended") -> None:
        super().__init__(name, what)
        self.name = name

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class RemoteError(MirrorError, RuntimeError):
    """A method of an actor has raised; the message ends with its traceback there.

    Attributes:
        type_name: the name of the exception's class.
        message: its text.
        traceback: of the actor's process.
        original: the exception, rebuilt here; ``None`` where pickle cannot. Also ``__cause__``.
    """

    def __init__(
        self,
        type_name: str,
        message: str,
        traceback: str = "",
        original: BaseException | None = None,
    ) -> None:
        super().__init__(type_name, message, traceback)
        self.type_name, self.message, self.traceback = type_name, message, traceback
        self.original = self.__cause__ = original

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}\n{self.traceback}".rstrip()


class WireError(MirrorError, RuntimeError):
    """What came over a connection is not what was agreed, or something cannot be sent over it."""


class ClusterError(MirrorError, ValueError, RuntimeError):
    """What a launcher or the program says of the cluster is wrong, contradictory or missing.

    TensorFlow raises ValueError for some of it and RuntimeError for the rest; this is both.
    """


class ClusterTypeError(ClusterError, TypeError):
    """What a launcher or the program says of the cluster is of another type than it has to be."""


class RecordError(MirrorError, ValueError):
    """A record of a data file is damaged, or does not hold what it should.

    Attributes:
        path: the file, ``None`` for a record that came from none.
        record: the record's number in the file, from 0.
        offset: bytes from the start of the (decompressed) file to the start of the record.
    """

    path: str | None = None
    record: int | None = None
    offset: int | None = None

    @classmethod
    def at_record(cls, path: str, record: int, offset: int, what: str) -> RecordError:
        """Returns the error that says ``what`` is wrong with which record."""
        # Not arguments of the constructor: a DataLoader rebuilds errors from the text alone.
        error = cls(f"{path}, record {record} at byte {offset}: {what}")
        error.path, error.record, error.offset = path, record, offset
        return error


def short_repr(value: object) -> str:
    """Returns what a value is: itself where that is short, else its kind and size.

    ::

        'median'    3    [1, -1]    a float32 tensor of shape (4, 2)    a list of 2    a PerReplica
    """
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{_article(dtype)} {dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{_article(value.dtype.name)} {value.dtype} array of shape {value.shape}"
    if isinstance(value, _PLAIN):
        text = repr(value)
        return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."
    if isinstance(value, _CONTAINERS):
        entries = [*value.values(), *value] if isinstance(value, dict) else list(value)
        is_plain = all(isinstance(entry, _PLAIN) for entry in entries)
        text = repr(value) if is_plain and len(value) <= _MAX_LENGTH else ""
        return text if 0 < len(text) <= _MAX_LENGTH else f"{_kind(value)} of {len(value)}"
    return _kind(value)


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{_article(name)} {name}"


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" and not word.startswith("uint") else "a"
