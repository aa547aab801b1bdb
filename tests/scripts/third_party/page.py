"""The text of build/third-party.md, from the rows of all libraries."""

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from tests.scripts.third_party.program import CASES, PAIRS

_HEAD = """# Third-party code, program by program

docs/third-party.md says how programs are compared, and sums these rows up.

- *difference*: the largest of all losses (relative), and of all parameters and buffers after the
  last step (relative to the change of the tensor in training). *right* is below 1e-6, in float32
  1e-2.
- *chaotic*: the difference is larger, but not after one step, and plain training that takes the
  examples of each batch in reverse order is about as far from plain training.
- *refused*: an error says so; nothing wrong is computed. *DIFFERS*, *ERROR*: read the remark.
- *ratio*: processor time of a mirrored step over a plain one: the median, least and greatest of
  {pairs} pairs of steps made in turn on one thread of a CPU, where 3 replicas cannot be faster,
  and small models are all overhead. {load}

{run}

{total}

"""
_COLUMNS = "library | version | what was trained | way | difference | ratio | verdict | remark"
_RULE = "---|---|---|---|---|---|---|---"


def text(seen: Mapping[str, Sequence[dict]], root: Path) -> str:
    """Returns the page.

    Args:
        seen: the rows of each library that was trained.
        root: the repository, for the commit.
    """
    rows = [row for library in sorted(seen, key=str.lower) for row in seen[library]]
    loads = [row["load"] for row in rows if row.get("load")] or [0.0]
    command = ["git", "log", "-1", "--format=%h", "--", "mirror", "csrc"]
    commit = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()
    numpy = importlib.metadata.version("numpy")
    head = _HEAD.format(
        pairs=PAIRS,
        load=f"The load average was {min(loads):.1f} to {max(loads):.1f},\n  on "
        f"{os.cpu_count()} cores; above 1, other programs ran at the same time.",
        run=f"Written on {datetime.now(UTC):%Y-%m-%d}, on {platform.machine()}, {os.cpu_count()} "
        f"cores, {platform.system()};\ntorch {torch.__version__}, numpy {numpy}, Python "
        f"{platform.python_version()}; mirror as of commit {commit}.",
        total=total(rows),
    )
    missing = [f"{name} ({len(CASES[name])} programs)" for name in CASES if name not in seen]
    end = f"\nNot run: {', '.join(sorted(missing, key=str.lower))}.\n" if missing else ""
    return head + "\n".join([f"| {_COLUMNS} |", f"|{_RULE}|", *map(line, rows)]) + "\n" + end


def total(rows: list[dict]) -> str:
    """Returns how many rows have which verdict."""
    verdicts = [row["verdict"] for row in rows]
    counts = [f"{verdicts.count(v)} {v}" for v in sorted(set(verdicts), key=str.lower)]
    libraries = {row["library"] for row in rows}
    return f"{len(rows)} rows of {len(libraries)} libraries: {', '.join(counts)}."


def line(row: dict) -> str:
    """Returns a row of the table."""
    difference, ratios = row.get("difference"), row.get("ratios")
    spread = f"{median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})" if ratios else ""
    remark = re.sub(r" \(/[^)]*\)?", "", row["remark"])  # paths of the machine
    cells = [
        row["library"],
        _version(row["library"]),
        row["name"],
        str(row["way"]),
        "" if difference is None else f"{difference:.0e}",
        spread,
        row["verdict"],
        remark,
    ]
    return "| " + " | ".join(cells) + " |"


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "?"
