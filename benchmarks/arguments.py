"""Argument types that reject an invalid value before the benchmark begins."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path

import checkout  # noqa: F401  # before any program imports mirror


def at_least(least: int) -> Callable[[str], int]:
    """Returns the type of a whole number from ``least`` on."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"needs a whole number of at least {least}, got {text!r}"
            )
        return value

    return whole


ROUNDS = at_least(2)
"""Two, for quartiles."""


def new_file(text: str) -> str:
    """The type of a writable path: tries to open it, and leaves an existing file as it is."""
    path = Path(text)
    try:
        existed = path.exists()
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written ({error.strerror}); its folder must exist"
        ) from None
    return text


def new_picture(text: str) -> str:
    """The type of a path of a picture; requires matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "needs matplotlib; run: pip install 'mirror-strategy[bench]'"
        )
    return new_file(text)
