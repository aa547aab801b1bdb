"""Verdicts: what was found out about a machine, kept on disk for the processes after this one."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import time

from mirror.base.atomic_file import replace_atomically

FOLDER_VARIABLE = "MIRROR_CACHE_DIR"
"""The environment's name for the folder; empty for none, so that nothing is remembered."""

# Something else may have been in the way: a GPU that others used, a machine that stood still.
_FAILURE_SECONDS = 24 * 3600.0

_logger = logging.getLogger("mirror")


@dataclass(frozen=True)
class Verdict:
    """What came of a trial.

    Attributes:
        reason: how it failed; ``None`` when it passed.
    """

    reason: str | None


def load(facts: Mapping[str, object]) -> Verdict | None:
    """Returns the verdict on these very facts; ``None`` if there is none that counts.

    A failure counts for a day. What is damaged, or cannot be read, is as if it was not there.
    """
    file = _file(facts)
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
        if found is None or found["facts"] != _plain(facts):
            return None
        reason, age = found["reason"], time() - float(found["when"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if reason is None or (isinstance(reason, str) and 0 <= age < _FAILURE_SECONDS):
        return Verdict(reason)
    return None


def store(facts: Mapping[str, object], verdict: Verdict) -> None:
    """Keeps a verdict, in place of an earlier one, where there is a folder that takes it."""
    file = _file(facts)
    if file is None:
        return
    text = json.dumps({"facts": _plain(facts), "reason": verdict.reason, "when": time()})
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another process that reads or writes the same file never finds a partial one.
        with replace_atomically(file, 0o600) as new:
            new.write(text.encode())
    except OSError as error:
        _logger.debug("what was found out is not kept: %s", error)


def _file(facts: Mapping[str, object]) -> Path | None:
    name = hashlib.sha256(json.dumps(_plain(facts)).encode()).hexdigest()
    folder = _folder()
    return None if folder is None else folder / f"{name}.json"


def _plain(facts: Mapping[str, object]) -> dict[str, object]:
    """Returns the facts as JSON brings them back, in one order."""
    plain: dict[str, object] = json.loads(json.dumps(facts, sort_keys=True, default=str))
    return plain


def _folder() -> Path | None:
    given = os.environ.get(FOLDER_VARIABLE)
    if given is not None:
        return Path(given) / "trials" if given else None
    # Relative paths are to be ignored, by the specification of XDG_CACHE_HOME.
    caches = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(caches) if os.path.isabs(caches) else Path.home() / ".cache"
    except RuntimeError:  # the user has no home directory
        return None
    return base / "mirror" / "trials"
