"""Splitting a global batch over the replicas, by the one balanced rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from mirror.errors import BatchError
from mirror.values import ABSENT, PerReplica, children_of, rebuild_node


def split_sizes(num_examples: int, num_replicas: int) -> tuple[int, ...]:
    """Returns how many examples each replica gets: at most one apart, the larger ones first."""
    size, num_larger = divmod(num_examples, num_replicas)
    return (size + 1,) * num_larger + (size,) * (num_replicas - num_larger)


def batch_size(batch: Any) -> int:
    """Returns the first dimension that all batched leaves of a batch share.

    Batched leaves are tensors and numpy arrays of at least one dimension.

    Raises:
        BatchError: there is no batched leaf, their lengths differ, or one cannot be split.
    """
    shapes: dict[str, tuple[int, ...]] = {
        path: tuple(leaf.shape)
        for path, leaf in _leaves(batch, "batch")
        if isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim
    }
    if not shapes:
        raise BatchError(
            "a batch must hold a tensor or numpy array with a dimension of examples; got "
            f"{_summary(batch)} without any; collate the examples into tensors"
        )
    lengths = {shape[0] for shape in shapes.values()}
    if len(lengths) > 1:
        found = ", ".join(f"{path} of shape {shape}" for path, shape in shapes.items())
        raise BatchError(
            "all tensors and arrays of a batch must have the examples as their first dimension, "
            f"equally many; got {found}; give what belongs to no example as a 0-d tensor, or "
            "not as part of the batch"
        )
    return lengths.pop()


def split_batch(batch: Any, devices: Sequence[torch.device]) -> Any:
    """Splits a global batch into contiguous parts, one per replica, each on its device.

    ====================================  ====================================================
    a leaf of ``batch``                   becomes
    ====================================  ====================================================
    tensor, at least 1-d                  ``PerReplica`` of its parts; views where it is on
                                          the replica's device already
    numpy array, at least 1-d             the same with tensors, which may share its memory;
                                          with arrays for dtypes that torch lacks (strings)
    list or tuple of ``batch_size``       ``PerReplica`` of its parts, lists or tuples: the
    strings, nothing else                 names of the examples, as ``default_collate`` has them
    0-d tensor                            ``PerReplica`` of the whole on every device
    anything else                         itself, and so goes to every replica
    ====================================  ====================================================

    Any other list or tuple is structure: a list of numbers goes to every replica whole, as do
    strings that are not as many as the examples.

    Each ``PerReplica`` has the numbers of examples as its ``weights``. A replica without
    examples has no part (``ABSENT``) of what was split; of an empty batch the first replica
    gets the empty part.

    Raises:
        BatchError: see ``batch_size``.
    """
    sizes = split_sizes(batch_size(batch), len(devices))
    bounds = list(zip(accumulate(sizes, initial=0), sizes, devices, strict=False))

    def per_replica(part_of: Callable[[int, int, torch.device], object]) -> PerReplica[Any]:
        parts = [
            part_of(start, size, device) if size or replica_id == 0 else ABSENT
            for replica_id, (start, size, device) in enumerate(bounds)
        ]
        return PerReplica(parts, weights=sizes)

    def split(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            if tree.ndim == 0:
                return PerReplica([tree.to(device) for device in devices], weights=sizes)
            return per_replica(lambda start, size, device: _narrow(tree, start, size, device))
        if isinstance(tree, np.ndarray) and tree.ndim:
            return per_replica(lambda start, size, device: _slice(tree, start, size, device))
        if _is_strings(tree) and len(tree) == sum(sizes):
            return per_replica(lambda start, size, device: tree[start : start + size])
        children = children_of(tree)
        if children is None:
            return tree
        return rebuild_node(tree, {key: split(child) for key, child in children.items()})

    return split(batch)


def _narrow(tensor: Tensor, start: int, size: int, device: torch.device) -> Tensor:
    # Not tensor_split: autograd forbids writing to one of several views that one call returned.
    return tensor.narrow(0, start, size).to(device)


def _slice(array: Any, start: int, size: int, device: torch.device) -> Any:
    part = array[start : start + size]
    try:
        return _as_tensor(part).to(device)
    except TypeError:
        return part


def _as_tensor(array: Any) -> Tensor:
    """Raises ``TypeError`` where torch has no such dtype."""
    try:
        # Torch warns about read-only memory, since its tensors can always be written to.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except ValueError:  # a reversed or byte-swapped array
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


def _is_strings(tree: Any) -> bool:
    return type(tree) in (list, tuple) and all(isinstance(item, (str, bytes)) for item in tree)


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a batch with where they are, like ``batch['image'][0]``."""
    _refuse_unsplittable(tree, path)
    children = None if isinstance(tree, Tensor) else children_of(tree)
    if children is None:
        yield path, tree
        return
    for key, child in children.items():
        step = f".{key}" if dataclasses.is_dataclass(tree) else f"[{key!r}]"
        yield from _leaves(child, path + step)


def _refuse_unsplittable(tree: object, path: str) -> None:
    if isinstance(tree, PackedSequence):
        what, advice = "a PackedSequence", "pass the padded tensor and the lengths, and pack in fn"
    elif isinstance(tree, PerReplica):
        what, advice = "a PerReplica", "pass the global batch, from before it was distributed"
    elif isinstance(tree, Tensor) and (tree.layout is not torch.strided or tree.is_nested):
        kind = "nested" if tree.is_nested else str(tree.layout).removeprefix("torch.")
        what, advice = f"a {kind} tensor", "pass a dense tensor, and convert it in fn"
    else:
        return
    raise BatchError(f"{what} cannot be split over replicas; {path} is one; {advice}")


def _summary(batch: object) -> str:
    text = repr(batch)
    return text if len(text) <= 80 else f"{text[:77]}..."
