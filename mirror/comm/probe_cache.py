"""The cache of probe results on disk, by the facts of the machine."""

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
from mirror.base.private_folder import private_folder, read_private

FOLDER_VARIABLE = "MIRROR_CACHE_DIR"
"""The variable with the cache folder; if it is empty, nothing is stored."""

# A failure may have another cause, such as a GPU in use by another program.
_FAILURE_SECONDS = 24 * 3600.0

_logger = logging.getLogger("mirror")


@dataclass(frozen=True)
class Verdict:
    """The result of a probe.

    Attributes:
        reason: how it failed; ``None`` if it passed.
    """

    reason: str | None


def load(facts: Mapping[str, object]) -> Verdict | None:
    """Returns the stored result for exactly these facts, or ``None``.

    A failure is valid for a day. A damaged or unreadable file counts as missing, and so does
    one that another user can change.
    """
    try:
        file = _file(facts)
        entry = json.loads(read_private(file)) if file is not None else None
        if entry is None or entry["facts"] != _plain(facts):
            return None
        reason, age = entry["reason"], time() - float(entry["when"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if reason is None or (isinstance(reason, str) and 0 <= age < _FAILURE_SECONDS):
        return Verdict(reason)
    return None


def store(facts: Mapping[str, object], verdict: Verdict) -> None:
    """Stores a result in place of an earlier one, if the folder is writable."""
    text = json.dumps({"facts": _plain(facts), "reason": verdict.reason, "when": time()})
    try:
        file = _file(facts, create=True)
        if file is None:
            return
        # Another process that reads or writes the same file never finds a partial one.
        with replace_atomically(file, 0o600) as new:
            new.write(text.encode())
    except OSError as error:
        _logger.debug("the result of a probe is not stored: %s", error)


def _file(facts: Mapping[str, object], *, create: bool = False) -> Path | None:
    name = hashlib.sha256(json.dumps(_plain(facts)).encode()).hexdigest()
    folder = _folder()
    if folder is None:
        return None
    return private_folder(folder, create=create) / f"{name}.json"


def _plain(facts: Mapping[str, object]) -> dict[str, object]:
    """Returns the facts as JSON decodes them, in a fixed order."""
    plain: dict[str, object] = json.loads(json.dumps(facts, sort_keys=True, default=str))
    return plain


def _folder() -> Path | None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        return Path(folder) / "trials" if folder else None
    # The specification of XDG_CACHE_HOME says to ignore relative paths.
    caches = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(caches) if os.path.isabs(caches) else Path.home() / ".cache"
    except RuntimeError:  # the user has no home directory
        return None
    return base / "mirror" / "trials"
