"""The numbers that arguments may be: Python's and NumPy's, and never a bool."""

from __future__ import annotations

import numbers
from typing import TypeGuard

from mirror.errors import short_repr


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether a value is an integer, also one of NumPy, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[float]:
    """Returns whether a value is a real number, also one of NumPy, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_timeout(seconds: object) -> None:
    """Raises ValueError unless ``timeout_seconds`` is a number from 0 on, or None."""
    # ``not >=`` is true for NaN, too. Numbers of NumPy return bools of NumPy.
    if seconds is not None and not (is_real(seconds) and float(seconds) >= 0):
        raise ValueError(
            f"timeout_seconds must be a number >= 0 or None, got {short_repr(seconds)}; None has "
            "no limit, or that of the backend"
        )
