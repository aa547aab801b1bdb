"""Contents: a checkpoint read from the disk, every byte of it verified."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mirror.errors import CheckpointError
from mirror.train.checkpoint.atomic_checkpoint import read_manifest, write_checkpoint
from mirror.train.checkpoint.manifest import Manifest
from mirror.train.checkpoint.snapshot import Snapshot
from mirror.train.checkpoint.tensor_file import read_tensors, write_tensors

_NUM_TRIES = 10


@dataclass(frozen=True)
class Contents:
    """What a checkpoint has: states of objects, and of the random generators.

    Attributes:
        path: where it was.
        manifest: what it says of itself.
        packed: the states, with the tensors.
        states: the states as they are given to objects.
        random: that of the random generators.
        apart: what replicas keep apart in the buffers of modules.
    """

    path: Path
    manifest: Manifest
    packed: Snapshot
    states: dict[str, Any]
    random: Any
    apart: Any

    @property
    def digest(self) -> bytes:
        """A hash of what was read, whoever reads it."""
        return hashlib.blake2b(self.manifest.to_bytes(), digest_size=16).digest()


def write_contents(path: Path, packed: Snapshot, step: int | None) -> None:
    """Writes a checkpoint of tensors that are contiguous on the host, atomically.

    Raises:
        CheckpointError: it cannot be written; an older one that is there stays.
    """

    def write(file: int, data_name: str) -> bytes:
        stored = write_tensors(file, packed.stored)
        manifest = Manifest(
            step,
            {"torch": torch.__version__, "python": platform.python_version(), "at": time.time()},
            data_name,
            stored,
            packed.views,
            packed.objects,
            packed.random,
            packed.apart,
            packed.others,
        )
        return manifest.to_bytes()

    try:
        write_checkpoint(path, write)
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written ({error}); what was there before is still there"
        ) from error


def read_contents(path: str | os.PathLike[str], rank: int = 0, size: int = 1) -> Contents:
    """Reads a checkpoint, and verifies it.

    Args:
        rank, size: of several workers, which one is to restore it.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = Path(path)
    with torch.inference_mode(False):
        manifest, tensors = reading(found, lambda m: read_tensors(found / m.data_name, m.stored))
        packed = Snapshot(
            *(manifest.objects, manifest.random, manifest.apart, tensors, manifest.views),
            manifest.others,
        ).of_worker(rank, size)
        states, random, apart = packed.states(), packed.random_state(), packed.kept_apart()
    return Contents(found, manifest, packed, states, random, apart)


def reading(path: Path, read: Callable[[Manifest], Any]) -> tuple[Manifest, Any]:
    """Returns a manifest, and what ``read`` makes of it.

    A checkpoint that is being replaced may lose its tensors in between; then it is read anew.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    for _ in range(_NUM_TRIES):
        manifest = read_manifest(path)
        try:
            return manifest, read(manifest)
        except FileNotFoundError:
            if _data_name(path) == manifest.data_name:
                break
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error
    raise CheckpointError(
        f"{path} lacks its tensors, the file {manifest.data_name}; restore an older checkpoint"
    )


def _data_name(path: Path) -> str:
    return read_manifest(path).data_name
