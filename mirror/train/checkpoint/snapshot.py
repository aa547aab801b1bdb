"""Snapshot: the states of objects as a checkpoint holds them, and how they are taken and read.

Tied weights, and views that a state holds together with their base, are stored once. Of the
tensors in one storage, a contiguous one that is no part of a larger one is stored. Any other
tensor that lies completely within a stored one is a view: a shape, strides, an offset. Tensors
that shared memory when they were saved share memory again after reading.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mirror.base.bitwise import bytes_of
from mirror.base.tree_json import Malformed, decode, encode
from mirror.devices import is_simulated, synchronize
from mirror.errors import CheckpointError
from mirror.replica.params.replicated_buffers import local_buffers
from mirror.train.checkpoint.checkpoint_directory import file_of, write_directory
from mirror.train.checkpoint.checkpoint_file import (
    Manifest,
    ObjectState,
    TensorView,
    WorkerStates,
    describe_tensors,
    parse_manifest,
    read_file,
    read_manifest,
    span,
    write_file,
)
from mirror.train.checkpoint.stateful_objects import (
    GENERATOR,
    PLACED,
    VALUE,
    capture_global_rng,
    kind_of,
    state_of,
)

_METADATA_NAME = "__metadata__"  # safetensors files have no tensor of this name
_ALIGNMENT = 64


@dataclass(frozen=True)
class Snapshot:
    """The states of objects, with their tensors.

    Attributes:
        manifest: everything but the tensors.
        tensors: the stored tensors; before they are copied they may be the objects' own.
        rank: the worker that restores it, an index of ``manifest.workers``.
    """

    manifest: Manifest
    tensors: dict[str, Tensor]
    rank: int = 0

    @property
    def objects(self) -> dict[str, ObjectState]:
        """The states of the objects as JSON, by the names that the user gave."""
        workers = self.manifest.workers
        return workers[0].objects | workers[self.rank].objects

    def with_tensors(self, tensors: dict[str, Tensor]) -> Snapshot:
        """Returns the same with copies of the tensors."""
        return replace(self, tensors=tensors)

    def with_workers(self, others: Sequence[Snapshot]) -> Snapshot:
        """Returns the same with the states of the other workers, which have other names."""
        workers, tensors, views = [*self.manifest.workers], dict(self.tensors), self.manifest.views
        for other in others:
            new = other.tensors.keys() | other.manifest.views.keys()
            if new & (tensors.keys() | views.keys()):
                raise CheckpointError("the name of an object must not begin with 'worker 1/'")
            workers += other.manifest.workers
            tensors |= other.tensors
            views = views | other.manifest.views
        described = describe_tensors(tensors)
        manifest = replace(self.manifest, tensors=described, workers=workers, views=views)
        return Snapshot(manifest, tensors)

    def with_chief(self, chief: Snapshot) -> Snapshot:
        """Returns the same with worker 0's own states in place of this worker's."""
        this_worker, (of_chief,) = self.manifest.workers[0], chief.manifest.workers
        first = replace(of_chief, objects=this_worker.objects | of_chief.objects)
        return replace(self, manifest=replace(self.manifest, workers=[])).with_workers(
            [replace(chief, manifest=replace(chief.manifest, workers=[first]))]
        )

    def states(self) -> dict[str, Any]:
        """Returns the states of the objects, by the names that the user gave.

        Raises:
            CheckpointError: a state was not written by ``encode``; names the object.
        """
        return {
            name: self._decode(saved.state, repr(name), saved.kind in PLACED)
            for name, saved in self.objects.items()
        }

    def random_state(self) -> Any:
        """Returns the state of the global random generators."""
        return self._decode(self._own.random, "the random generators", False)

    def replica_buffers(self) -> Any:
        """Returns the per-replica copies of buffers, by the names of modules."""
        return self._decode(self._own.buffers, "the replicas' buffers", False)

    @property
    def _own(self) -> WorkerStates:
        return self.manifest.workers[self.rank]

    def _decode(self, node: Any, what: str, is_placed: bool) -> Any:
        def get(name: str, device: str) -> Tensor:
            view = self.manifest.views.get(name)
            tensor = self.tensors[name] if view is None else view.make_view(self.tensors)
            return _move(tensor, device) if is_placed and device != "cpu" else tensor

        try:
            return decode(node, get)
        except (Malformed, RecursionError) as error:
            raise CheckpointError(
                f"the state of {what} is damaged, or mirror did not write it: {error}"
            ) from error

    def to_tensors(self) -> list[Tensor]:
        """Returns the snapshot as tensors, to be sent to another worker."""
        text = bytearray(self.manifest.to_text().encode())
        return [torch.frombuffer(text, dtype=torch.uint8), *self.tensors.values()]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> Snapshot:
        """Returns the snapshot that ``to_tensors`` has written."""
        manifest = parse_manifest(tensors[0].numpy().tobytes().decode())
        names = [entry.name for entry in manifest.tensors]
        return cls(manifest, dict(zip(names, tensors[1:], strict=True)))

    def digest(self) -> bytes:
        """Returns a hash of the states and the tensors."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in self.to_tensors():
            for raw in bytes_of(tensor):
                digest.update(raw)
        return digest.digest()


def take_snapshot(objects: Mapping[str, Any], *, values: bool = True) -> Snapshot:
    """Returns the states of objects, without copying tensors.

    Args:
        values: whether plain values are included.

    Raises:
        CheckpointError: a value cannot be written; names it.
    """
    kinds = {name: kind_of(name, obj) for name, obj in objects.items()}
    chosen = {name: kind for name, kind in kinds.items() if values or kind != VALUE}
    return _take(objects, chosen, "")


def take_worker_snapshot(objects: Mapping[str, Any], prefix: str = "") -> Snapshot:
    """Returns the states that may differ between workers that train together.

    Args:
        prefix: the beginning of the names of tensors.

    Raises:
        CheckpointError: a value cannot be written; names it.
    """
    kinds = {name: kind_of(name, obj) for name, obj in objects.items()}
    chosen = {name: kind for name, kind in kinds.items() if kind == GENERATOR}
    return _take(objects, chosen, prefix)


def _take(objects: Mapping[str, Any], kinds: Mapping[str, str], prefix: str) -> Snapshot:
    found = FoundTensors()
    saved: dict[str, ObjectState] = {}
    with torch.no_grad():
        for name, kind in kinds.items():
            obj = objects[name]
            state = encode(state_of(name, kind, obj), prefix + name, found.add)
            saved[name] = ObjectState(kind, type(obj).__name__, state)
        random = encode(capture_global_rng(), f"{prefix}random generators", found.add)
        modules = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
        copies = {name: local_buffers(module) for name, module in modules.items()}
        buffers = {name: own for name, own in copies.items() if own}
        states = WorkerStates(saved, random, encode(buffers, f"{prefix}replicas", found.add))
    stored, views = found.split_aliases()
    return Snapshot(Manifest(None, describe_tensors(stored), views, [states]), stored)


class FoundTensors:
    """The tensors found in a state, by unique names."""

    def __init__(self) -> None:
        self._named: dict[str, Tensor] = {}

    def add(self, tensor: Tensor, name: str) -> str:
        """Adds a tensor; returns its name, which differs if another tensor has that name."""
        unique, count = name, 1
        while unique in self._named or unique == _METADATA_NAME:
            count += 1
            unique = f"{name}#{count}"
        self._named[unique] = tensor.resolve_conj().resolve_neg()
        return unique

    def split_aliases(self) -> tuple[dict[str, Tensor], dict[str, TensorView]]:
        """Returns the tensors to store, widest elements first, and the views of them."""
        stored: dict[str, Tensor] = {}
        views: dict[str, TensorView] = {}
        by_memory: dict[Any, list[tuple[str, Tensor]]] = {}
        for name, tensor in self._named.items():
            if tensor.numel() == 0:
                stored[name] = tensor
            else:
                memory = tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.device
                by_memory.setdefault(memory, []).append((name, tensor))
        for group in by_memory.values():
            _split_group(group, stored, views)
        order = sorted(stored, key=lambda name: -stored[name].element_size())
        return {name: stored[name] for name in order}, views


def _split_group(
    group: list[tuple[str, Tensor]], stored: dict[str, Tensor], views: dict[str, TensorView]
) -> None:
    """Splits the tensors of one storage into stored ones and views."""
    bases: list[tuple[str, Tensor]] = []
    # Contiguous ones first, the largest first among them; equal ones in the order found.
    for name, tensor in sorted(group, key=lambda g: (not g[1].is_contiguous(), -g[1].numel())):
        start, shape, strides = int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
        for base_name, base in bases:
            first = int(base.storage_offset())
            if first <= start and start + span(shape, strides) <= first + base.numel():
                views[name] = TensorView(base_name, shape, tuple(strides), start - first)
                break
        else:
            stored[name] = tensor
            if tensor.is_contiguous():
                bases.append((name, tensor))


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns contiguous copies on the host."""
    return {
        name: torch.empty(t.shape, dtype=t.dtype, device="cpu").copy_(t)
        for name, t in tensors.items()
    }


def contiguous_on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors contiguous on the host, without a copy where they are already."""
    return {name: t.to("cpu").contiguous() for name, t in tensors.items()}


def _move(tensor: Tensor, device: str) -> Tensor:
    """Returns a tensor on its former device, or on the host where that device is missing."""
    try:
        return tensor.to(device)
    except (RuntimeError, AssertionError):
        return tensor


class StagingBuffers:
    """Host memory for the copies of a save that does not wait; pinned for tensors of GPUs.

    The next save reuses the memory: allocating or pinning its pages costs more than the copy.
    """

    def __init__(self) -> None:
        self._layout: list[Any] = []
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns finished copies, which are valid until the next call."""
        sources = list(tensors.values())
        devices = {tensor.device for tensor in sources}
        is_pinned = not is_simulated(list(devices))
        layout = [is_pinned, *((tensor.shape, tensor.dtype) for tensor in sources)]
        if layout != self._layout:
            self._layout, self._copies = [], []  # frees the old memory first
            self._copies = _allocate(sources, is_pinned=is_pinned)
            self._layout = layout
        if is_pinned:
            for copy, tensor in zip(self._copies, sources, strict=True):
                copy.copy_(tensor, non_blocking=True)
            for device in devices:
                synchronize(device)
        elif sources:
            torch._foreach_copy_(self._copies, sources)
        return dict(zip(tensors, self._copies, strict=True))


def _allocate(tensors: Sequence[Tensor], *, is_pinned: bool) -> list[Tensor]:
    """Returns tensors of these shapes and dtypes, in one allocation."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    copies = []
    for start, tensor in zip(starts, tensors, strict=True):
        part = memory[start : start + tensor.numel() * tensor.element_size()]
        copies.append(part.view(tensor.dtype).view(tensor.shape))
    return copies


@dataclass(frozen=True)
class Contents:
    """A checkpoint that was read from the disk, with every byte verified.

    Attributes:
        path: its directory.
        snapshot: the states as JSON, and the tensors.
        states: the states as they are given to objects.
        random: the state of the global random generators.
        buffers: the per-replica copies of buffers, by the names of modules.
    """

    path: Path
    snapshot: Snapshot
    states: dict[str, Any]
    random: Any
    buffers: Any


def write_contents(path: Path, snapshot: Snapshot, step: int | None) -> None:
    """Writes a checkpoint atomically; its tensors are contiguous on the host.

    Raises:
        CheckpointError: it cannot be written; an older one that is there stays.
    """
    manifest = replace(snapshot.manifest, step=step)
    try:
        write_directory(path, lambda file: write_file(file, manifest, snapshot.tensors))
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written ({error}); what was there before is still there"
        ) from error


def read_contents(path: str | os.PathLike[str], rank: int = 0, size: int = 1) -> Contents:
    """Reads and verifies a checkpoint.

    Args:
        rank, size: the worker that restores it, and the number of workers.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = Path(path)
    with torch.inference_mode(False):
        try:
            manifest, tensors = read_file(file_of(found))
        except OSError as error:
            raise _unreadable(found, error) from error
        has_own = len(manifest.workers) == size
        snapshot = Snapshot(manifest, tensors, rank if has_own else 0)
        states, random = snapshot.states(), snapshot.random_state()
        return Contents(found, snapshot, states, random, snapshot.replica_buffers())


def read_manifest_of(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint; its tensors are not read.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        return read_manifest(file_of(path))
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return CheckpointError(f"{path} cannot be read ({error})")
    if not path.exists():
        return CheckpointError(f"{path} does not exist")
    return CheckpointError(f"{path} is no checkpoint: it has no {file_of(path).name}")
