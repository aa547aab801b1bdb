"""Conversion: two lines that put a plain training script under a strategy.

The script is read as a syntax tree and changed as text: lines are added, and none is touched.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mirror.errors import MirrorError
from mirror.files import replacing
from mirror.train.conversion.refusals import reason_against
from mirror.train.conversion.script import Script, Spot

__all__ = ["Conversion", "ConversionError", "convert"]

_BATCH_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
_PLACING = ("to", "cuda")


class ConversionError(MirrorError, ValueError):
    """A script cannot be converted by adding lines; the message says what to do instead."""


@dataclass(frozen=True)
class Conversion:
    """A script before and after.

    Attributes:
        notes: what a user should look at, a sentence each.
    """

    path: Path
    before: str
    after: str
    encoding: str
    notes: tuple[str, ...]

    def diff(self) -> str:
        """Returns the unified diff, for ``patch`` and ``git apply``."""
        name = self.path.name
        lines = difflib.unified_diff(
            _lines(self.before), _lines(self.after), f"a/{name}", f"b/{name}"
        )
        return "".join(f"{line}\n" if not line.endswith("\n") else line for line in lines)

    def write(self) -> None:
        """Replaces the script, or leaves it as it is if that fails; keeps its permissions."""
        target = self.path.resolve()
        with replacing(target) as file:
            os.fchmod(file.fileno(), target.stat().st_mode & 0o7777)
            file.write(self.after.encode(self.encoding))


def convert(path: Path, devices: Sequence[str] | None = None) -> Conversion:
    """Reads a script and returns it with the lines that mirror its models.

    Args:
        devices: what the strategy is given; ``None`` for all GPUs.

    Raises:
        ConversionError: it is no script that two lines can convert.
    """
    try:
        content = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        before = content.decode(encoding)
        script = Script(before)
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise ConversionError(f"{path} is no program of this Python: {error}") from None
    reason = reason_against(script)
    if reason is not None:
        raise ConversionError(f"{path} is not converted: {reason}")
    spots = script.spots()
    reason = _bad_spots(spots, before)
    if reason is not None:
        raise ConversionError(f"{path} is not converted: {reason}")
    after = _with_lines(before, _additions(script, spots, devices, before))
    ast.parse(after)
    return Conversion(path, before, after, encoding, tuple(_notes(script)))


def _bad_spots(spots: list[Spot], source: str) -> str | None:
    if not spots:
        return (
            "no optimizer is made of a model's parameters() here; give the file that makes it, "
            "or call strategy.mirror(model) before the optimizer yourself (docs/init.md)"
        )
    lines = _lines(source)
    for spot in spots:
        where = f"line {spot.statement.lineno}"
        if not all(part.isidentifier() for part in spot.model.split(".")):
            return f"{where} takes the parameters of {spot.model}; give that model a name before"
        if spot.model == "self":
            return (
                f"{where} makes an optimizer inside the model; make it where the model is made, "
                "of model.parameters()"
            )
        start = lines[spot.statement.lineno - 1].encode()[: spot.statement.col_offset]
        if start.strip():
            return f"{where} has several statements; give each a line of its own"
    if len({spot.function for spot in spots}) > 1 and len({spot.model for spot in spots}) > 1:
        return (
            "optimizers are made of several models in several functions, and one strategy must "
            "mirror all of them: make it where all can see it, and call strategy.mirror(model) "
            "before each optimizer yourself (docs/init.md)"
        )
    return None


def _additions(
    script: Script, spots: list[Spot], devices: Sequence[str] | None, source: str
) -> dict[int, list[str]]:
    """Returns lines to add, by the number of the line that they come before."""
    given = "" if devices is None else "[" + ", ".join(f'"{name}"' for name in devices) + "]"
    strategy = f"mirror.MirroredStrategy({given})"
    lines, added = _lines(source), {_line_for_import(script.tree): ["import mirror"]}
    is_foreign = "torchvision.models" in source or "torchvision import models" in source
    has_batch_norms = is_foreign or any(map(script.line_of_first, _BATCH_NORMS))
    ordered = sorted(spots, key=lambda spot: spot.statement.lineno)
    if len({spot.model for spot in spots}) > 1:
        _add(added, lines, ordered[0], f"strategy = {strategy}")
        strategy = "strategy"
    for spot in ordered:
        if has_batch_norms:
            _add(added, lines, spot, f"mirror.nn.convert_sync_batchnorm({spot.model})")
        _add(added, lines, spot, f"{strategy}.mirror({spot.model})")
    return added


def _add(added: dict[int, list[str]], lines: list[str], spot: Spot, text: str) -> None:
    number = spot.statement.lineno
    line = lines[number - 1]
    added.setdefault(number, []).append(line[: len(line) - len(line.lstrip())] + text)


def _line_for_import(tree: ast.Module) -> int:
    """Returns the line behind the imports that a script begins with."""
    last = 0
    for statement in tree.body:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(
            statement.value, ast.Constant
        )
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            last = statement.end_lineno or statement.lineno
        elif not is_docstring:
            break
    return last + 1


def _with_lines(source: str, added: dict[int, list[str]]) -> str:
    lines = _lines(source)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    whole = []
    for number, line in enumerate(lines, 1):
        whole += [f"{new}{end}" for new in added.get(number, ())] + [line]
    return "".join(whole)


def _notes(script: Script) -> list[str]:
    notes = []
    if not any(script.line_of_first(name) for name in _PLACING):
        notes.append(
            "nothing is moved to a device here; where there are GPUs, what the model gives is on "
            "the first one, and labels must be there, too: y.to('cuda')"
        )
    return notes


def _lines(text: str) -> list[str]:
    """Returns the lines as Python counts them, with their ends."""
    return io.StringIO(text, newline="").readlines()
