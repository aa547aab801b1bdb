"""``mirror checkpoint``: what a checkpoint holds, as text, and as a file for ``torch.load``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import torch

from mirror.errors import CheckpointError
from mirror.train.checkpoint.checkpoint import Checkpoint
from mirror.train.checkpoint.checkpoint_directory import is_checkpoint
from mirror.train.checkpoint.checkpoint_file import Manifest
from mirror.train.checkpoint.manager import CheckpointManager
from mirror.train.checkpoint.snapshot import read_contents, read_manifest_of


def describe_checkpoint(path: str | os.PathLike[str], *, verify: bool = False) -> str:
    """Returns the step, the objects and the tensors of a checkpoint, one per line.

    Args:
        path: a checkpoint, or the directory of a manager for its newest checkpoint.
        verify: whether to read the tensors too, and compare their checksums.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = _checkpoint_at(path)
    manifest = read_contents(found).snapshot.manifest if verify else read_manifest_of(found)
    lines = [f"{found}", *_summary(manifest), "", *_table(manifest)]
    if verify:
        lines += ["", "every byte is as it was written"]
    return "\n".join(line if line.isprintable() else ascii(line) for line in lines)


def export_checkpoint(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
    """Writes the states of a checkpoint as one file for ``torch.load``: a dict by name.

    ``torch.load(to)["model"]`` is what ``model.load_state_dict`` takes. Like every file of
    ``torch.save``, it is a pickle; mirror does not read it.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the file exists.
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
    if not is_checkpoint(found) and found.is_dir():
        latest = CheckpointManager(Checkpoint(), found).latest
        if latest is not None:
            return latest.path
    return found


def _summary(manifest: Manifest) -> Iterator[str]:
    if manifest.step is not None:
        yield f"step {manifest.step}"
    at = manifest.written_by.get("at")
    if isinstance(at, (int, float)) and 0 <= at < 2**40:
        moment = datetime.fromtimestamp(at, timezone.utc)
        yield f"saved {moment:%Y-%m-%d %H:%M:%S} UTC with torch {manifest.written_by.get('torch')}"
    for name, saved in manifest.workers[0].objects.items():
        yield f"{name}: {saved.kind}, {saved.type_name}"
    num_bytes = sum(tensor.num_bytes for tensor in manifest.tensors)
    yield f"{len(manifest.tensors)} tensors of {num_bytes} bytes, {len(manifest.views)} more views"


def _table(manifest: Manifest) -> Iterator[str]:
    stored = {tensor.name: tensor for tensor in manifest.tensors}
    rows = [(t.name, t.dtype, t.shape, f"{t.num_bytes} bytes") for t in manifest.tensors]
    for name, view in manifest.views.items():
        base = stored[view.base]
        is_whole = math.prod(view.shape) == base.num_elements
        what = f"the same as {view.base}" if is_whole else f"a part of {view.base}"
        rows.append((name, base.dtype, view.shape, what))
    texts = [
        (name, str(dtype).removeprefix("torch."), "x".join(map(str, shape)) or "one", what)
        for name, dtype, shape, what in rows
    ]
    widths = [max((len(row[i]) for row in texts), default=0) for i in range(3)]
    for row in sorted(texts):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[3]])
