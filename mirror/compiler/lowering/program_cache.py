"""Kept: finished programs on disk, for the processes that follow. See [Note: Kept programs]."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mirror.base.safe_files import private_folder, read_private
from mirror.compiler.lowering.programs import CallableProgram
from mirror.compiler.lowering.step_plan import PlanLevel, ProgramPiece, StepPlan
from mirror.compiler.torch_internals import Sizes, cache_folder, library_of, program_of_library

logger = logging.getLogger(__name__)

Ready = tuple["CallableProgram | None", "CallableProgram | None"]
_CPU = torch.device("cpu")
_INDEX = "step.pickle"


def store_program(key: str, pieces: StepPlan, levels: Sequence[Ready], sizes: Sizes) -> bool:
    """Keeps programs that inductor has made for the CPU; returns whether they can be kept.

    A process that is ended while it writes leaves nothing that another one would find.
    """
    root = _root()
    if root is None:
        return False
    libraries: list[Path] = []
    numbers: list[list[int | None]] = []
    for level in levels:
        numbers.append([])
        for called in level:
            if called is None:
                numbers[-1].append(None)
                continue
            library = library_of(called.programs[_CPU]) if called.is_raw else None
            if library is None or len(called.programs) > 1:
                return False
            numbers[-1].append(len(libraries))
            libraries.append(library)
    try:
        _write(root / key, libraries, numbers, pieces, sizes)
    except (OSError, pickle.PicklingError, TypeError, AttributeError) as error:
        logger.info("programs of a compiled step are not kept: %s", error)
        return False
    return True


def _write(
    folder: Path,
    libraries: Sequence[Path],
    numbers: Sequence[Sequence[int | None]],
    pieces: StepPlan,
    sizes: Sizes,
) -> None:
    private_folder(folder.parent, create=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        digests = []
        for i, library in enumerate(libraries):
            shutil.copyfile(library, made / f"{i}.so")
            (made / f"{i}.so").chmod(0o600)
            digests.append(_digest(made / f"{i}.so"))
        levels = [
            PlanLevel(_without_graph(level.shared), _without_graph(level.own), level.meetings)
            for level in pieces.levels
        ]
        index = (replace(pieces, levels=levels), [*map(tuple, numbers)], digests, sizes)
        (made / _INDEX).write_bytes(pickle.dumps(index))
        (made / _INDEX).chmod(0o600)
        made.rename(folder)
    except OSError:
        if not (folder / _INDEX).exists():  # else another process was first
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _without_graph(piece: ProgramPiece | None) -> ProgramPiece | None:
    return None if piece is None else replace(piece, graph=None)


def load_program(key: str) -> tuple[StepPlan, list[Ready], Sizes] | None:
    """Returns what was kept by this key, ready to be called; ``None``: nothing, or no longer."""
    root = _root()
    if root is None or not (root / key / _INDEX).exists():
        return None
    try:
        folder = private_folder(root / key)
    except OSError as error:  # another user can change it, and its code is run
        logger.info("programs of a compiled step are not loaded: %s", error)
        return None
    try:
        pieces, numbers, digests, sizes = pickle.loads(read_private(folder / _INDEX))
        if digests != [_digest(folder / f"{i}.so") for i in range(len(digests))]:
            raise OSError(f"{folder} has been damaged")
        levels = [
            (_called(level.shared, of_shared, folder), _called(level.own, of_own, folder))
            for level, (of_shared, of_own) in zip(pieces.levels, numbers, strict=True)
        ]
    except Exception as error:  # whatever lies there: it can be made anew
        logger.info("programs of a compiled step are made anew: %s", error)
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        return None
    return pieces, levels, sizes


def _called(
    piece: ProgramPiece | None, number: int | None, folder: Path
) -> CallableProgram | None:
    if piece is None or number is None:
        return None
    program = program_of_library(folder / f"{number}.so", folder.name)
    return CallableProgram(piece, {_CPU: program}, is_raw=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(read_private(path)).hexdigest()


def _root() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "mirror_steps"
