"""Packed: the states of some objects as a manifest has them, and the tensors apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mirror.errors import CheckpointError
from mirror.replica.copies.apart import copies_apart
from mirror.train.archive.manifest import Saved
from mirror.train.archive.sharing import Tensors, View
from mirror.train.archive.skeleton import encode
from mirror.train.archive.skeleton_reader import Malformed, decode
from mirror.train.checkpoint.entries import VALUE, keeps_device, kind_of, state_of
from mirror.train.checkpoint.random_state import take_global


@dataclass(frozen=True)
class Packed:
    """States of objects.

    Attributes:
        objects: by the names that the user gave.
        random: that of the global generators, a skeleton.
        apart: what replicas keep apart in the buffers of modules, by their names, a skeleton.
        stored: the tensors, which may be the objects' own.
        views: of these.
    """

    objects: dict[str, Saved]
    random: Any
    apart: Any
    stored: dict[str, Tensor]
    views: dict[str, View]

    def with_tensors(self, stored: dict[str, Tensor]) -> Packed:
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
            tensor = self.stored[name] if view is None else view.seen(self.stored)
            return _placed(tensor, device) if is_placed and device != "cpu" else tensor

        try:
            return decode(skeleton, get)
        except (Malformed, RecursionError) as error:
            raise CheckpointError(
                f"the state of {what} is damaged, or was written by something else: {error}"
            ) from error


def pack(objects: Mapping[str, Any], *, values: bool = True) -> Packed:
    """Takes the states of objects, without copying tensors.

    Args:
        values: whether plain values are among them.

    Raises:
        CheckpointError: something cannot be written; names it.
    """
    tensors = Tensors()
    packed: dict[str, Saved] = {}
    with torch.no_grad():
        for name, obj in objects.items():
            kind = kind_of(name, obj)
            if kind != VALUE or values:
                state = encode(state_of(name, kind, obj), name, tensors.put)
                packed[name] = Saved(kind, type(obj).__name__, state)
        random = encode(take_global(), "random generators", tensors.put)
        modules = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
        found = {name: copies_apart(module) for name, module in modules.items()}
        apart = encode({n: f for n, f in found.items() if f}, "replicas", tensors.put)
    return Packed(packed, random, apart, *tensors.parted())


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
