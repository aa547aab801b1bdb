"""PlanError, and the checks of what a plan is made of."""

from __future__ import annotations

import math
from collections.abc import Collection

from mirror.errors import MirrorError, short_repr


class PlanError(MirrorError, ValueError):
    """A plan was asked for of what is no step, no link, or no number of devices."""


def positive(name: str, value: object) -> float:
    """Returns a number above 0 as a float.

    Raises:
        PlanError: it is none; the message says what came.
    """
    number = _number(name, value)
    if number <= 0:
        raise PlanError(f"{name} must be above 0, got {short_repr(value)}")
    return number


def not_negative(name: str, value: object) -> float:
    """Returns a number of at least 0 as a float.

    Raises:
        PlanError: it is none; the message says what came.
    """
    number = _number(name, value)
    if number < 0:
        raise PlanError(f"{name} must not be below 0, got {short_repr(value)}")
    return number


def share(name: str, value: object) -> float:
    """Returns a number from 0 to 1 as a float.

    Raises:
        PlanError: it is none; the message says what came.
    """
    number = _number(name, value)
    if not 0 <= number <= 1:
        raise PlanError(f"{name} must be a share from 0 to 1, got {short_repr(value)}")
    return number


def whole(name: str, value: object) -> int:
    """Returns a whole number of at least 1, of any numeric type.

    Raises:
        PlanError: it is none; the message says what came.
    """
    number = _number(name, value)
    if number < 1 or number != int(number):
        raise PlanError(f"{name} must be a whole number of at least 1, got {short_repr(value)}")
    return int(number)


def one_of(name: str, value: object, choices: Collection[str]) -> str:
    """Returns the name that came, one of the choices.

    Raises:
        PlanError: it is none of them; the message lists them.
    """
    if not isinstance(value, str) or value not in choices:
        raise PlanError(f"{name} must be one of {', '.join(choices)}; got {short_repr(value)}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise PlanError(f"{name} must be a finite number, got {short_repr(value)}")
    return float(value)
