"""The reason why a library that is built from csrc/host cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_BUILD = "python setup.py build_ext --inplace"


def unusable_reason(path: Path, is_current: Callable[[], bool]) -> str | None:
    """Returns why a library cannot be used; ``None`` if it can.

    Args:
        is_current: loads the library, and returns whether it was built from this version of csrc/.
    """
    if not path.exists():
        return (
            f"its library {path.name} is not built; install mirror with pip where there is g++, "
            f"or run `{_BUILD}` in a checkout"
        )
    try:
        if is_current():
            return None
    except (OSError, AttributeError) as error:
        return (
            f"its library {path.name} does not load ({error}); reinstall mirror, or run `{_BUILD} "
            "--force` in a checkout"
        )
    return f"its library {path.name} was built from another version of csrc/; build it again"
