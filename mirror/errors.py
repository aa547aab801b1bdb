"""The exceptions of mirror. Each message states the rule, the value and the remedy.

``short_repr`` describes a value in a message: briefly, and without the data of tensors.

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
    NanLossError(ArithmeticError)         a value that a training has logged is NaN or infinite
    ReplicaMismatchError(RuntimeError)    variables that must be equal have different bits
    GradientError(ArithmeticError)        a gradient is NaN or infinite
    CheckpointError(RuntimeError)         a checkpoint is missing, damaged or foreign
    RecordError(ValueError)               a record is damaged, or has unexpected content
    WorkerLostError(RuntimeError)         a worker, another process of the training, is lost
    ServerLostError(RuntimeError)         a parameter server is lost, with its values
    ActorDied(RuntimeError)               the process of an actor, a server or a worker, has ended
    RemoteError(RuntimeError)             an actor's method has raised
    WireError(RuntimeError)               received bytes are no message, or a value cannot be sent
    ClusterError(ValueError, RuntimeError)  the description of the cluster is wrong or incomplete
        ClusterTypeError(TypeError)       it has a wrong type
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
    """A device does not exist, is not visible, or does not fit the other devices."""


class BackendError(MirrorError, RuntimeError):
    """A communication backend is unknown or cannot serve the devices; with the reason."""


class StrategyError(MirrorError, RuntimeError):
    """A call was made at the wrong time or in the wrong context."""


class CompileError(StrategyError):
    """A step cannot be traced; the message names the line."""


class StepError(StrategyError, TypeError):
    """A scheduled step has a value that cannot be sent to a worker; the message names it."""


class StructureError(MirrorError, ValueError):
    """Nested values differ in structure between replicas."""


class BatchError(MirrorError, ValueError):
    """The leaves of a batch cannot be split together."""


class ShapeError(MirrorError, ValueError):
    """Tensors of one collective differ in shape or dtype, overlap, or are not contiguous."""


class DivergenceError(MirrorError, RuntimeError):
    """Replicas did not all reach the same merge point."""


class CollectiveTimeoutError(MirrorError, TimeoutError):
    """A collective, or a replica at which other replicas wait, took longer than the timeout."""


class GradientError(MirrorError, ArithmeticError):
    """A replica's gradient has elements that are NaN or infinite."""


class NanLossError(MirrorError, ArithmeticError):
    """A value that a training has logged, usually its loss, is NaN or infinite."""


class ReplicaMismatchError(MirrorError, RuntimeError):
    """A variable or an optimizer state differs between replicas."""


class CheckpointError(MirrorError, RuntimeError):
    """A checkpoint is missing, damaged, or was written by another program."""


class WorkerLostError(MirrorError, RuntimeError):
    """Another process of the training is lost, or has made no progress for the timeout."""


class ServerLostError(MirrorError, RuntimeError):
    """A parameter server is lost, and with it its values and optimizer states."""


class ActorDied(MirrorError, RuntimeError):
    """The process of an actor, a parameter server or a worker, has ended or never started.

    Attributes:
        name: the actor's name.
    """

    def __init__(self, name: str, what: str = "its process has ended") -> None:
        super().__init__(name, what)
        self.name = name

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class RemoteError(MirrorError, RuntimeError):
    """A method of an actor has raised; the message ends with the traceback of that process.

    Attributes:
        type_name: the name of the exception's class.
        message: the exception's text.
        traceback: the traceback in the actor's process.
        original: the unpickled exception; ``None`` if it cannot be pickled. Also ``__cause__``.
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
    """Bytes of a connection violate the protocol, or a value cannot be sent."""


class ListenError(MirrorError, OSError):
    """A process cannot listen at an address; ``errno`` is that of the system's error."""


class ClusterError(MirrorError, ValueError, RuntimeError):
    """The description of the cluster, by a launcher or the program, is wrong or incomplete.

    TensorFlow raises ValueError for some of these faults and RuntimeError for the rest; this is
    both.
    """


class ClusterTypeError(ClusterError, TypeError):
    """The description of the cluster has a wrong type."""


class RecordError(MirrorError, ValueError):
    """A record of a data file is damaged, or has unexpected content.

    Attributes:
        path: the file; ``None`` for a record that is not from a file.
        record: the record's number in the file, from 0.
        offset: the start of the record in the (decompressed) file, in bytes.
    """

    path: str | None = None
    record: int | None = None
    offset: int | None = None

    @classmethod
    def at_record(cls, path: str, record: int, offset: int, what: str) -> RecordError:
        """Returns the error for a fault of one record."""
        # Not arguments of the constructor: a DataLoader creates errors again from the text alone.
        error = cls(f"{path}, record {record} at byte {offset}: {what}")
        error.path, error.record, error.offset = path, record, offset
        return error


def short_repr(value: object) -> str:
    """Returns the ``repr`` of a value if it is short, else its kind and size.

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


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text."""
    return str(error).strip().partition("\n")[0]


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{_article(name)} {name}"


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" and not word.startswith("uint") else "a"
