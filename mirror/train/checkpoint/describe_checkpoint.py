"""What is in a checkpoint, for people; and as a file that ``torch.load`` reads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import torch

from mirror.errors import CheckpointError
from mirror.train.checkpoint.atomic_checkpoint import has_manifest, read_manifest
from mirror.train.checkpoint.checkpoint import Checkpoint
from mirror.train.checkpoint.manager import CheckpointManager
from mirror.train.checkpoint.manifest import Manifest
from mirror.train.checkpoint.read_checkpoint import read_contents


def describe_checkpoint(path: str | os.PathLike[str], *, verify: bool = False) -> str:
    """Returns the step, the objects and the tensors of a checkpoint, a line each.

    Args:
        path: a checkpoint, or a manager's directory, whose newest one is meant.
        verify: whether to read the tensors, too, and compare their checksums.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = _checkpoint_at(path)
    manifest = read_contents(found).manifest if verify else read_manifest(found)
    lines = [f"{found}", *_head(manifest), "", *_table(manifest)]
    if verify:
        lines += ["", "every byte is as it was written"]
    return "\n".join(map(_printable, lines))


def export_checkpoint(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
    """Writes the states of a checkpoint as one file for ``torch.load``: a dict by name.

    ``torch.load(to)["model"]`` is what ``model.load_state_dict`` takes. This file is a pickle, as
    those of ``torch.save`` are; it is not read here.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or there is such a file already.
    """
    contents = read_contents(_checkpoint_at(path))
    try:
        with open(to, "xb") as file:
            torch.save(contents.states, file)
    except FileExistsError:
        raise CheckpointError(f"{to} is there already; choose another name") from None
    except OSError as error:
        raise CheckpointError(f"{to} could not be written ({error})") from error


def _checkpoint_at(path: str | os.PathLike[str]) -> Path:
    found = Path(path)
    if not has_manifest(found) and found.is_dir():
        latest = CheckpointManager(Checkpoint(), found).latest
        if latest is not None:
            return latest.path
    return found


def _head(manifest: Manifest) -> Iterator[str]:
    if manifest.step is not None:
        yield f"step {manifest.step}"
    at = manifest.written_by.get("at")
    if isinstance(at, (int, float)) and 0 <= at < 2**40:
        moment = datetime.fromtimestamp(at, timezone.utc)
        yield f"saved {moment:%Y-%m-%d %H:%M:%S} UTC with torch {manifest.written_by.get('torch')}"
    for name, saved in manifest.objects.items():
        yield f"{name}: {saved.kind}, {saved.type_name}"
    num_bytes = sum(stored.num_bytes for stored in manifest.stored)
    yield f"{len(manifest.stored)} tensors of {num_bytes} bytes, {len(manifest.views)} more views"


def _table(manifest: Manifest) -> Iterator[str]:
    rows = [
        (s.name, str(s.dtype).removeprefix("torch."), _shape(s.shape), f"{s.num_bytes} bytes")
        for s in manifest.stored
    ]
    for name, view in manifest.views.items():
        dtype = next(s.dtype for s in manifest.stored if s.name == view.of)
        whole = math.prod(view.shape) == manifest.sizes[view.of]
        what = f"the same as {view.of}" if whole else f"a part of {view.of}"
        rows.append((name, str(dtype).removeprefix("torch."), _shape(view.shape), what))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    for row in sorted(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[3]])


def _printable(line: str) -> str:
    """Returns a line without what a terminal would take for commands."""
    return line if line.isprintable() else ascii(line)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one"
