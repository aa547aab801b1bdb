"""Packed: the states of some objects as a manifest has them, and the tensors apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mirror.errors import CheckpointError
from mirror.replica.params.mirrored_buffer import local_buffers
from mirror.replica.replica_checks import bytes_of
from mirror.train.checkpoint.aliasing import Tensors, View
from mirror.train.checkpoint.generator_state import take_global
from mirror.train.checkpoint.manifest import SavedTensor
from mirror.train.checkpoint.stateful_objects import (
    GENERATOR,
    VALUE,
    keeps_device,
    kind_of,
    state_of,
)
from mirror.train.checkpoint.tree_json import Malformed, decode, encode


@dataclass(frozen=True)
class Snapshot:
    """States of objects.

    Attributes:
        objects: by the names that the user gave.
        random: that of the global generators, a skeleton.
        apart: what replicas keep apart in the buffers of modules, by their names, a skeleton.
        stored: the tensors, which may be the objects' own.
        views: of these.
        others: what workers but the first have of their own, by rank: objects' states by name,
            ``random``, ``apart``; none where that is the same on all.
    """

    objects: dict[str, SavedTensor]
    random: Any
    apart: Any
    stored: dict[str, Tensor]
    views: dict[str, View]
    others: list[dict[str, Any]] = field(default_factory=list)

    def with_others(self, own: OwnState) -> Snapshot:
        """Returns the same with what other workers have of their own."""
        if own.stored.keys() & (self.stored.keys() | self.views.keys()):
            raise CheckpointError("no name of a checkpoint's objects may begin with 'worker 1/'")
        stored = self.stored | own.stored
        return replace(self, stored=stored, views=self.views | own.views, others=own.states)

    def of_worker(self, rank: int, size: int) -> Snapshot:
        """Returns what one of so many workers is to restore."""
        if not rank or len(self.others) != size - 1:
            return self
        own = self.others[rank - 1]
        mine = {
            name: replace(self.objects[name], state=own["objects"][name])
            for name in own["objects"]
        }
        return replace(self, objects=self.objects | mine, random=own["random"], apart=own["apart"])

    def with_tensors(self, stored: dict[str, Tensor]) -> Snapshot:
        """Returns the same with copies of the tensors."""
        return replace(self, stored=stored)

    def states(self) -> dict[str, Any]:
        """Returns the objects' states.

        Raises:
            CheckpointError: something is none of ours; names the entry.
        """
        return {
            name: self._decoded(saved.state, f"{name!r}", keeps_device(saved.kind))
            for name, saved in self.objects.items()
        }

    def random_state(self) -> Any:
        """Returns the state of the global generators."""
        return self._decoded(self.random, "the random generators", False)

    def kept_apart(self) -> Any:
        """Returns what replicas keep apart in the buffers of modules, by their names."""
        return self._decoded(self.apart, "the replicas' buffers", False)

    def _decoded(self, skeleton: Any, what: str, is_placed: bool) -> Any:
        def get(name: str, device: str) -> Tensor:
            view = self.views.get(name)
            tensor = self.stored[name] if view is None else view.same_memory(self.stored)
            return _placed(tensor, device) if is_placed and device != "cpu" else tensor

        try:
            return decode(skeleton, get)
        except (Malformed, RecursionError) as error:
            raise CheckpointError(
                f"the state of {what} is damaged, or was written by something else: {error}"
            ) from error


@dataclass(frozen=True)
class OwnState:
    """What workers have of their own.

    Attributes:
        states: of each worker: objects' states by name, ``random``, ``apart``.
        stored, views: as Packed has them.
    """

    states: list[dict[str, Any]]
    stored: dict[str, Tensor]
    views: dict[str, View]

    @classmethod
    def join(cls, every: Sequence[OwnState]) -> OwnState:
        """Returns what several workers have, whose tensors have names of their own."""
        states = [state for own in every for state in own.states]
        stored = {name: tensor for own in every for name, tensor in own.stored.items()}
        return cls(states, stored, {name: v for own in every for name, v in own.views.items()})

    def as_tensors(self) -> list[Tensor]:
        """Returns it as tensors alone."""
        views = {name: [v.of, v.shape, v.strides, v.offset] for name, v in self.views.items()}
        text = json.dumps([self.states, list(self.stored), views]).encode()
        return [torch.frombuffer(bytearray(text), dtype=torch.uint8), *self.stored.values()]

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor]) -> OwnState:
        """Returns what ``as_tensors`` returned."""
        states, names, views = json.loads(tensors[0].numpy().tobytes())
        found = {n: View(of, tuple(a), tuple(b), at) for n, (of, a, b, at) in views.items()}
        return cls(states, dict(zip(names, tensors[1:], strict=True)), found)

    def digest(self) -> bytes:
        """Returns a hash of all of it."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in self.as_tensors():
            for raw in bytes_of(tensor):
                digest.update(raw)
        return digest.digest()


def pack_own(objects: Mapping[str, Any], prefix: str) -> OwnState:
    """Takes what this worker may have of its own: it differs between workers that train alike.

    Args:
        prefix: what the names of tensors begin with.

    Raises:
        CheckpointError: something cannot be written; names it.
    """
    tensors = Tensors()
    states: dict[str, Any] = {}
    with torch.no_grad():
        for name, obj in objects.items():
            kind = kind_of(name, obj)
            if kind == GENERATOR:
                states[name] = encode(state_of(name, kind, obj), prefix + name, tensors.put)
        random, apart = _of_process(objects, prefix, tensors)
    stored, views = tensors.parted()
    return OwnState([{"objects": states, "random": random, "apart": apart}], stored, views)


def pack(objects: Mapping[str, Any], *, values: bool = True) -> Snapshot:
    """Takes the states of objects, without copying tensors.

    Args:
        values: whether plain values are among them.

    Raises:
        CheckpointError: something cannot be written; names it.
    """
    tensors = Tensors()
    packed: dict[str, SavedTensor] = {}
    with torch.no_grad():
        for name, obj in objects.items():
            kind = kind_of(name, obj)
            if kind != VALUE or values:
                state = encode(state_of(name, kind, obj), name, tensors.put)
                packed[name] = SavedTensor(kind, type(obj).__name__, state)
        random, apart = _of_process(objects, "", tensors)
    return Snapshot(packed, random, apart, *tensors.parted())


def _of_process(objects: Mapping[str, Any], prefix: str, tensors: Tensors) -> tuple[Any, Any]:
    """Returns the random generators, and what replicas keep apart."""
    random = encode(take_global(), f"{prefix}random generators", tensors.put)
    modules = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
    found = {name: local_buffers(module) for name, module in modules.items()}
    apart = {name: one for name, one in found.items() if one}
    return random, encode(apart, f"{prefix}replicas", tensors.put)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns contiguous copies on the host."""
    return {
        name: torch.empty(t.shape, dtype=t.dtype, device="cpu").copy_(t)
        for name, t in tensors.items()
    }


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors contiguous on the host: themselves, where they are that already."""
    return {name: t.to("cpu").contiguous() for name, t in tensors.items()}


def _placed(tensor: Tensor, device: str) -> Tensor:
    """Returns a tensor on the device that it was on, or on the host where that is missing."""
    try:
        return tensor.to(device)
    except (RuntimeError, AssertionError):
        return tensor
