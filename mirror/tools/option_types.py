"""Types of command-line options, for argparse: each returns the value, or raises its error."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def tolerance(text: str) -> float | str:
    """Returns "auto", or a number above 0."""
    return text if text == "auto" else positive_number(text)


def positive_number(text: str) -> float:
    """Returns a number above 0."""
    return _number(text, lambda value: value > 0, "a number above 0")


def number_not_negative(text: str) -> float:
    """Returns a number of at least 0."""
    return _number(text, lambda value: value >= 0, "a number of at least 0")


def share(text: str) -> float:
    """Returns a number from 0 to 1."""
    return _number(text, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def whole(text: str) -> float:
    """Returns a whole number of at least 1, which may be written as 25e6."""
    return _number(
        text, lambda value: value >= 1 and value.is_integer(), "a whole number of at least 1"
    )


def _number(text: str, is_valid: Callable[[float], bool], rule: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not is_valid(value):
        raise argparse.ArgumentTypeError(f"needs {rule}, got {text!r}")
    return value


def link(text: str) -> str | tuple[float, ...]:
    """Returns a name, or the numbers of "GB/S,US"."""
    if "," not in text:
        return text
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs a name or GB/S,US; got {text!r}") from None


def device_names(text: str) -> tuple[str, ...]:
    """Returns the names between commas."""
    return tuple(text.split(","))


def worker_range(text: str) -> tuple[int, int]:
    """Returns MIN and MAX of "MIN:MAX"; both are N for "N"."""
    least, _, most = text.rpartition(":")
    values = positive(least or most), positive(most)
    if values[0] > values[1]:
        raise argparse.ArgumentTypeError(f"needs MIN:MAX with MIN <= MAX, got {text!r}")
    return values


def seed(text: str) -> int:
    """Returns a whole number of 64 bits."""
    return _integer(text, 0, "from 0 to 2**64 - 1", most=2**64 - 1)


def count(text: str) -> int:
    """Returns a whole number of at least 0."""
    return _integer(text, 0, "of at least 0")


def positive(text: str) -> int:
    """Returns a whole number of at least 1."""
    return _integer(text, 1, "of at least 1")


def _integer(text: str, least: int, rule: str, *, most: float = math.inf) -> int:
    value = int(text) if text.isdecimal() else -1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"needs a whole number {rule}, got {text!r}")
    return value
