"""What a module's call returns: its leaves, and the same structure with other leaves.

Beside tuples, lists, dicts and dataclasses, a call may return objects that hold values, such as a
cache of keys. In each call they are new objects, so a replay makes new ones, too.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.base.containers import assign, contents_of, empty_like, is_object, is_shared
from mirror.base.torch_private import storage_key
from mirror.compiler.free_variables import PLAIN
from mirror.values import map_structure

LEAVES = (Tensor, *PLAIN, type, enum.Enum)  # what a replay may return as it is


def output_leaves(outputs: Any) -> list[Any]:
    """Returns the leaves of outputs, also of objects in them."""
    leaves: list[Any] = []
    _map(leaves.append, outputs, {})
    return leaves


def rebuild_outputs(outputs: Any, leaves: Iterable[Any]) -> Any:
    """Returns outputs with other leaves, in the order of ``output_leaves``; objects are new."""
    remaining = iter(leaves)
    return _map(lambda _: next(remaining), outputs, {})


def distinct_tensors(outputs: Any) -> tuple[list[Tensor], list[int | None]]:
    """Returns the tensors in outputs, and for each leaf the number of its tensor there."""
    found: dict[int, tuple[int, Tensor]] = {}
    numbers: list[int | None] = []
    for leaf in output_leaves(outputs):
        if isinstance(leaf, Tensor):
            numbers.append(found.setdefault(id(leaf), (len(found), leaf))[0])
        else:
            numbers.append(None)
    return [tensor for _, tensor in found.values()], numbers


def have_common_elements(tensors: Sequence[Tensor]) -> bool:
    """Whether two of the tensors have an element in common; also of tensors without memory."""
    marks: dict[int, tuple[torch.dtype, np.ndarray[Any, Any]]] = {}
    keys = [*map(storage_key, tensors)]
    for key, tensor in zip(keys, tensors, strict=True):
        if keys.count(key) < 2 or not tensor.numel():
            continue
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        dtype, marked = marks.setdefault(key, (tensor.dtype, np.zeros(size, bool)))
        if dtype != tensor.dtype:
            return True
        own = np.lib.stride_tricks.as_strided(
            marked[tensor.storage_offset() :], tensor.shape, tensor.stride()
        )
        if own.any():
            return True
        own[...] = True
    return False


class OutputObjects:
    """The objects in the outputs of one call, which are not kept alive.

    Args:
        outputs: what the call has returned.
    """

    def __init__(self, outputs: Any) -> None:
        self._known: list[weakref.ref[Any]] = []
        for one in _objects_in(outputs):
            with suppress(TypeError):  # it has slots, and none for references
                self._known.append(weakref.ref(one))

    def find_kept(self, outputs: Any) -> object | None:
        """Returns an object that another call returns, too: the program keeps it."""
        known = {id(one()) for one in self._known if one() is not None}
        return next((one for one in _objects_in(outputs) if id(one) in known), None)


def _objects_in(outputs: Any) -> Iterator[Any]:
    made: dict[int, tuple[Any, Any]] = {}
    _map(lambda leaf: leaf, outputs, made)
    return (before for before, _ in made.values())


def _map(function: Callable[[Any], Any], tree: Any, made: dict[int, tuple[Any, Any]]) -> Any:
    """Returns ``tree`` with ``function`` of its leaves.

    Args:
        made: by ``id``, the objects and what stands for them.
    """

    def map_leaf(leaf: Any) -> Any:
        if not is_object(leaf) or is_shared(leaf):
            return function(leaf)
        if id(leaf) not in made:
            made[id(leaf)] = leaf, empty_like(leaf)
            held = contents_of(leaf)
            assign(made[id(leaf)][1], {k: _map(function, v, made) for k, v in held.items()})
        return made[id(leaf)][1]

    return map_structure(map_leaf, tree)
