"""The versions of torch and Python with which the smoke test was seen to pass."""

from __future__ import annotations

import platform

import torch

# docs/torch-versions.md has the table; pyproject.toml promises the same range.
OLDEST_TORCH, NEWEST_TORCH = (2, 7), (2, 15)
OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)

TORCH_RANGE = f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}"
PYTHON_RANGE = f"{OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} to {NEWEST_PYTHON[0]}.{NEWEST_PYTHON[1]}"


def range_warnings() -> tuple[str, ...]:
    """Returns a sentence for each of torch and Python that is outside of what was seen."""
    found = []
    if not OLDEST_TORCH <= _minor(torch.__version__) <= NEWEST_TORCH:
        found.append(_warning(f"torch {torch.__version__}", f"torch {TORCH_RANGE}"))
    if not OLDEST_PYTHON <= _minor(platform.python_version()) <= NEWEST_PYTHON:
        found.append(_warning(f"Python {platform.python_version()}", f"Python {PYTHON_RANGE}"))
    return tuple(found)


def _warning(what: str, seen: str) -> str:
    return (
        f"this is {what}, and mirror was seen to work with {seen} only; run tests/scripts/"
        "smoke.py of the source here before you trust it, or install one of those"
    )


def _minor(version: str) -> tuple[int, int]:
    """Returns (2, 7) for "2.7.0+cu126" and "2.7.0a0+git1234"."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
