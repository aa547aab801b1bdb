"""What has changed since a commit: files, and the functions that the changed lines are in."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.scripts.affected.marked import functions

HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


def git(*arguments: str, root: Path) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
    ).stdout


def base_of(root: Path, name: str = "main") -> str:
    """Returns the commit at which the present branch has left another; HEAD if there is none."""
    for other in (name, f"origin/{name}"):
        try:
            return git("merge-base", other, "HEAD", root=root).strip()
        except subprocess.CalledProcessError:
            continue
    return "HEAD"


def changed_files(root: Path, base: str) -> list[str]:
    """Returns the files that differ from a commit, those that git does not know yet included."""
    known = git("diff", "--name-only", "--no-renames", base, root=root)
    new = git("ls-files", "--others", "--exclude-standard", root=root)
    return sorted({*known.splitlines(), *new.splitlines()})


def changed_functions(root: Path, base: str, file: str) -> Iterator[str]:
    """Yields ``file:qualified.name`` of what the changed lines of a file of Python are in.

    Lines outside of functions are yielded as ``file:``, which no chart knows: the whole file.
    """
    path = root / file
    if not path.exists():
        yield f"{file}:"
        return
    difference = git("diff", "--unified=0", "--no-renames", base, "--", file, root=root)
    text = path.read_text()
    lines = list(_lines(difference)) or range(1, len(text.splitlines()) + 1)
    yield from (f"{file}:{name}" for name in names_at(ast.parse(text), lines))


def names_at(tree: ast.Module, lines: Iterable[int]) -> list[str]:
    """Returns the innermost functions that lines are in; "" for lines outside of all."""
    spans = [
        (min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno or 0, name)
        for name, node in functions(tree)
    ]
    found = set()
    for line in lines:
        around = [(first, name) for first, last, name in spans if first <= line <= last]
        found.add(max(around)[1] if around else "")
    return sorted(found)


def _lines(difference: str) -> Iterator[int]:
    for first, count in HUNK.findall(difference):
        # What is only taken out stands between two lines.
        number = int(count or 1)
        start = int(first)
        yield from range(start, start + number) if number else (start, start + 1)
