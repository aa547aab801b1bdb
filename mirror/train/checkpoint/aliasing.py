"""Which tensors of a state are stored, and which are other views of the same memory.

[Note: Stored once]
Tied weights, and views that a state holds beside what they are views of, are stored once. Of the
tensors on one storage, those that are contiguous and no part of a larger one are stored; any
other whose elements all lie within one of these is a view of it: a shape, strides, an offset.
What was one memory is one memory again in what is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_RESERVED = "__metadata__"  # in safetensors files no name of a tensor


@dataclass(frozen=True)
class View:
    """A tensor within a stored one: ``stored.flatten().as_strided(shape, strides, offset)``."""

    of: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def same_memory(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Returns the tensor; ``check`` has been called."""
        return stored[self.of].as_strided(self.shape, self.strides, self.offset)

    def check(self, num_elements: int) -> None:
        """Raises ValueError unless all its elements are among the stored tensor's."""
        if len(self.shape) != len(self.strides):
            raise ValueError(
                f"it has {len(self.shape)} dimensions and {len(self.strides)} strides"
            )
        if self.offset + _extent(self.shape, self.strides) > num_elements:
            raise ValueError(f"it reaches beyond the {num_elements} elements of {self.of!r}")


class Tensors:
    """The tensors of a state, as they are found; names are made unique."""

    def __init__(self) -> None:
        self._named: dict[str, Tensor] = {}

    def put(self, tensor: Tensor, name: str) -> str:
        """Adds a tensor; returns its name, which differs if another has it."""
        unique, count = name, 1
        while unique in self._named or unique == _RESERVED:
            count += 1
            unique = f"{name}#{count}"
        self._named[unique] = tensor.resolve_conj().resolve_neg()
        return unique

    def parted(self) -> tuple[dict[str, Tensor], dict[str, View]]:
        """Returns what is stored, widest elements first, and what are views of it."""
        stored: dict[str, Tensor] = {}
        views: dict[str, View] = {}
        on_one: dict[Any, list[tuple[str, Tensor]]] = {}
        for name, tensor in self._named.items():
            if tensor.numel() == 0:
                stored[name] = tensor
            else:
                memory = tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.device
                on_one.setdefault(memory, []).append((name, tensor))
        for group in on_one.values():
            _part(group, stored, views)
        order = sorted(stored, key=lambda name: -stored[name].element_size())
        return {name: stored[name] for name in order}, views


def _part(
    group: list[tuple[str, Tensor]], stored: dict[str, Tensor], views: dict[str, View]
) -> None:
    """Parts the tensors on one storage."""
    if len(group) == 1:
        stored.update(group)
        return
    bases: list[tuple[str, Tensor]] = []
    # Contiguous ones first, the largest of them before all; in the order found where equal.
    for name, tensor in sorted(group, key=lambda g: (not g[1].is_contiguous(), -g[1].numel())):
        start = int(tensor.storage_offset())
        end = start + _extent(tensor.shape, tensor.stride())
        for base_name, base in bases:
            first = int(base.storage_offset())
            if first <= start and end <= first + base.numel():
                shape, strides = tuple(tensor.shape), tuple(tensor.stride())
                views[name] = View(base_name, shape, strides, start - first)
                break
        else:
            stored[name] = tensor
            if tensor.is_contiguous():
                bases.append((name, tensor))


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Returns how many elements lie between the first and the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
