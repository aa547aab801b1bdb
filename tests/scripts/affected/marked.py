"""A copy of the tree in which the functions of mirror/ write down that they have run.

A function's first statement becomes ``__hits__[17] = 1``, in a file that the process of the tests
and all that it starts have mapped: threads, forks and workers are seen, and a call costs some tens
of nanoseconds. Lines keep their numbers, but for functions that begin with a block.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
HITS = "MIRROR_TEST_HITS"  # the variable that names the file
BEGINNING = f"""
import builtins, mmap, os
if not hasattr(builtins, "__hits__"):
    if os.path.exists(os.environ.get("{HITS}", "")):
        with open(os.environ["{HITS}"], "r+b") as _file:
            builtins.__hits__ = mmap.mmap(_file.fileno(), 0)
    else:
        builtins.__hits__ = bytearray(%d)
"""
# torch's compiler follows models into these, and refuses what the mark does.
FOLLOWED = ("mirror/replica/modules/module_dicts.py",)
BLOCKS = (
    *(ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.AsyncFor, ast.AsyncWith),
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, of: str = "") -> Iterator[tuple[str, Function]]:
    """Yields the functions of a module, or of a part of it, by their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield f"{of}{node.name}", node
        inside = f"{of}{node.name}." if isinstance(node, Function | ast.ClassDef) else of
        yield from functions(node, inside)


def copy_tree(to: Path) -> None:
    """Copies what git knows, and the libraries that are built in place."""
    told = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    built = (str(path.relative_to(ROOT)) for path in ROOT.glob("mirror/**/*.so"))
    for name in [*told.stdout.split("\0")[:-1], *built]:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def mark(tree: Path) -> list[str]:
    """Marks the functions of ``tree/mirror``; returns their names, ``file:qualified.name``."""
    names: list[str] = []
    for path in sorted(tree.glob("mirror/**/*.py")):
        if path.relative_to(tree).as_posix() in FOLLOWED:
            continue
        text = path.read_text()
        module = ast.parse(text)
        marks = []
        for name, function in functions(module):
            marks.append(_mark(function, len(names)))
            names.append(f"{path.relative_to(tree)}:{name}")
        path.write_text(_inserted(text, marks))
    package = tree / "mirror/__init__.py"
    text = package.read_text()
    first = ast.parse(text).body[1]
    lines = text.splitlines(keepends=True)
    lines.insert(first.lineno - 1, BEGINNING % len(names))
    package.write_text("".join(lines))
    return names


def _mark(function: Function, number: int) -> tuple[int, int, str]:
    """Returns where to insert what: a line and a column, both from zero."""
    text = f"__hits__[{number}] = 1"
    first = function.body[0]
    assert first.end_lineno is not None
    assert first.end_col_offset is not None
    if ast.get_docstring(function) is not None:
        return first.end_lineno - 1, first.end_col_offset, f"; {text}"
    if isinstance(first, BLOCKS):
        decorators = getattr(first, "decorator_list", [])
        line = min([first.lineno, *(each.lineno for each in decorators)])
        return line - 1, 0, f"{' ' * first.col_offset}{text}\n"
    return first.lineno - 1, first.col_offset, f"{text}; "


def _inserted(text: str, marks: list[tuple[int, int, str]]) -> str:
    lines = text.splitlines(keepends=True)
    for line, column, mark in sorted(marks, reverse=True):
        lines[line] = lines[line][:column] + mark + lines[line][column:]
    return "".join(lines)
