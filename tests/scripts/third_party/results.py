"""What was seen so far, in a file, so that a run goes on where it was ended."""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import torch


class Results:
    """The rows of the libraries.

    Those of another state of this library, of the programs or of torch are not kept.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self._path = path
        self._run = _run(root)
        self._seen: dict[str, dict] = {}
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["run"]["of"] == self._run["of"]:
                self._run["begun"] = kept["run"]["begun"]
                self._seen = kept["seen"]

    @property
    def run(self) -> dict:
        """When, where and with what."""
        return self._run

    def rows(self) -> list[dict]:
        return [row for _, seen in sorted(self._seen.items()) for row in seen["rows"]]

    def is_whole(self, library: str) -> bool:
        """Whether all programs of a library are there."""
        return bool(self._seen.get(library.lower(), {}).get("is_whole"))

    def begin(self, programs: dict[str, set[Path]]) -> list[str]:
        """Takes the files that train each library; returns the libraries still to be trained."""
        kept, self._seen = self._seen, {}
        for library, paths in programs.items():
            of = _digest([Path(__file__).with_name("program.py"), *paths])
            seen = kept.get(library.lower(), {})
            if not seen.get("is_whole") or seen["of"] != of:
                seen = {"of": of, "rows": [], "is_whole": False}
            self._seen[library.lower()] = seen
        return [name for name in programs if not self._seen[name.lower()]["is_whole"]]

    def add(self, library: str, row: dict) -> None:
        self._seen[library.lower()]["rows"].append(row)
        self._save()

    def finish(self, library: str) -> None:
        self._seen[library.lower()]["is_whole"] = True
        self._save()

    def forget(self) -> None:
        self._seen.clear()

    def _save(self) -> None:
        self._run["ended"] = _now()
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps({"run": self._run, "seen": self._seen}, indent=1))
        beside.replace(self._path)


def _run(root: Path) -> dict:
    numpy = importlib.metadata.version("numpy")
    versions = f"torch {torch.__version__}, numpy {numpy}, Python {platform.python_version()}"
    return {
        "of": {"sources": _digest((root / "mirror").rglob("*.py")), "versions": versions},
        "commit": _commit(root),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "cores": os.cpu_count(),
        "begun": _now(),
        "ended": _now(),
    }


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _commit(root: Path) -> str:
    """Returns the last commit that changed this library, "" outside of its repository."""
    command = ["git", "log", "-1", "--format=%h", "--", "mirror", "csrc"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.machine()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
