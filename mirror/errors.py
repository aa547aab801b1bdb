"""The exceptions mirror raises; each message says the rule, what came, and what to do.

MirrorError
    DeviceError(ValueError)               a device does not exist, or devices do not go together
    BackendError(RuntimeError)            an unknown backend, or one that cannot serve the devices
    StrategyError(RuntimeError)           a call at the wrong time or in the wrong context
    StructureError(ValueError)            nested values of replicas differ in structure
    BatchError(ValueError)                the leaves of a batch do not fit together
    ShapeError(ValueError)                tensors of one collective differ in shape or dtype
    DivergenceError(RuntimeError)         replicas did not reach the same merge points
    CollectiveTimeoutError(TimeoutError)  a collective or a replica took too long
    ReplicaMismatchError(RuntimeError)    variables that must be equal have different bits
    CheckpointError(RuntimeError)         a checkpoint is missing, damaged or foreign
    RecordError(ValueError)               a record is damaged, or does not hold what it should
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "BatchError",
    "CheckpointError",
    "CollectiveTimeoutError",
    "DeviceError",
    "DivergenceError",
    "MirrorError",
    "RecordError",
    "ReplicaMismatchError",
    "ShapeError",
    "StrategyError",
    "StructureError",
]


class MirrorError(Exception):
    """Base of every exception that mirror defines."""


class DeviceError(MirrorError, ValueError):
    """A device does not exist, is not visible, or does not go with the others."""


class BackendError(MirrorError, RuntimeError):
    """A communication backend is unknown or cannot serve these devices; carries the reason."""


class StrategyError(MirrorError, RuntimeError):
    """Something was called at a time or in a context where it has no meaning."""


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


class ReplicaMismatchError(MirrorError, RuntimeError):
    """A variable or an optimizer state that must be equal on all replicas is not."""


class CheckpointError(MirrorError, RuntimeError):
    """A checkpoint is missing, damaged, or was written for something else."""


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
    def at(cls, path: str, record: int, offset: int, what: str) -> RecordError:
        """Returns the error that says ``what`` is wrong with which record."""
        # Not arguments of the constructor: a DataLoader rebuilds errors from the text alone.
        error = cls(f"{path}, record {record} at byte {offset}: {what}")
        error.path, error.record, error.offset = path, record, offset
        return error
