"""The expected content of a feature of a tf.train.Example: FixedLenFeature, VarLenFeature."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mirror.errors import RecordError

Array = NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class FixedLenFeature:
    """A feature with the same number of values in every example, as ``tf.io.FixedLenFeature``.

    Attributes:
        shape: the shape of the values; ``()`` for a single value.
        dtype: ``numpy.float32``, ``numpy.int64``, or ``bytes`` (arrays of dtype ``object``).
        default_value: replaces a missing feature, broadcast to ``shape``; ``None`` makes the
            feature required.

    Raises:
        TypeError, ValueError: the shape or dtype is invalid, or the default value does not fit.
    """

    shape: Sequence[int]
    dtype: DTypeLike
    default_value: ArrayLike | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.shape, Iterable):
            raise TypeError(
                "the shape of a FixedLenFeature is a sequence of integers, () for a single "
                f"value; got {self.shape!r}"
            )
        shape = tuple(operator.index(size) for size in self.shape)
        if any(size < 0 for size in shape):
            raise ValueError(
                f"the sizes of a FixedLenFeature are 0 or more; got {shape}; for a number of "
                "values that varies use VarLenFeature"
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", _feature_dtype(self.dtype))
        if self.default_value is not None:
            default = _as_default(self.default_value, np.dtype(self.dtype))
            object.__setattr__(self, "default_value", np.broadcast_to(default, shape))

    def convert(self, name: str, values: Array | None) -> Array:
        """Returns the feature's flat values in its shape.

        Args:
            name: for errors.
            values: 1-d; ``None`` where the example has no such feature.

        Raises:
            RecordError: it is required and missing, or has another dtype or number of values.
        """
        shape = tuple(self.shape)
        if values is None:
            if self.default_value is None:
                raise RecordError(
                    f"feature {name!r} is required, and the example has none; give its "
                    "FixedLenFeature a default_value, or use VarLenFeature"
                )
            return np.array(self.default_value)
        _check_dtype(name, values, np.dtype(self.dtype))
        if values.size != np.prod(shape, dtype=np.int64):
            raise RecordError(
                f"feature {name!r} has {values.size} values, which do not fill the shape {shape}; "
                "for a number of values that varies use VarLenFeature"
            )
        return values.reshape(shape)


@dataclass(frozen=True)
class VarLenFeature:
    """A feature with any number of values, also none, as a 1-d array.

    Attributes:
        dtype: ``numpy.float32``, ``numpy.int64``, or ``bytes`` (arrays of dtype ``object``).
    """

    dtype: DTypeLike

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _feature_dtype(self.dtype))

    def convert(self, name: str, values: Array | None) -> Array:
        """Returns the values; an empty array if the example has no such feature.

        Raises:
            RecordError: the values have another dtype.
        """
        if values is None:
            return np.empty(0, self.dtype)
        _check_dtype(name, values, np.dtype(self.dtype))
        return values


def _feature_dtype(dtype: DTypeLike) -> np.dtype[np.generic]:
    rule = "a feature holds numpy.float32, numpy.int64 or bytes, for any values written to it"
    try:
        found = np.dtype(dtype)
    except TypeError:  # a dtype of torch, or an unknown name
        raise TypeError(f"{rule}; got {dtype!r}") from None
    if found.kind in "SO":
        return np.dtype(object)
    if found not in (np.float32, np.int64):
        raise ValueError(f"{rule}; got {found}; convert the parsed array with astype")
    return found


def _as_default(value: ArrayLike, dtype: np.dtype[np.generic]) -> Array:
    if dtype.kind != "O":
        return np.asarray(value).astype(dtype, casting="same_kind")
    default = np.asarray(value, object)
    if not all(isinstance(item, bytes) for item in default.flat):
        raise TypeError(f"the default_value of a feature of bytes is bytes; got {value!r}")
    return default


def _check_dtype(name: str, values: Array, dtype: np.dtype[np.generic]) -> None:
    if values.dtype != dtype:
        kinds = {np.dtype(object): "bytes"}
        raise RecordError(
            f"feature {name!r} holds {kinds.get(values.dtype, values.dtype)}, not "
            f"{kinds.get(dtype, dtype)}"
        )
