"""Splitting a global batch over the replicas, by the one balanced rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from mirror.errors import BatchError
from mirror.values import (
    ABSENT,
    PerReplica,
    children_of,
    map_structure,
    rebuild_node,
    select,
)

Copy = Callable[[Tensor, torch.device], Tensor]


class ExampleCounts(tuple[float, ...]):
    """Weights of replicas that are their numbers of examples, of a batch that was split."""


class GivenWeights(tuple[float, ...]):
    """Weights of replicas that a program has set.

    Attributes:
        counts: the numbers of examples that they stand for; ``None`` if these are not known.
    """

    counts: tuple[float, ...] | None = None

    @classmethod
    def for_counts(cls, weights: Iterable[float], counts: Sequence[float] | None) -> GivenWeights:
        """Returns weights, set for replicas with these numbers of examples."""
        given = cls(weights)
        given.counts = None if counts is None else tuple(counts)
        return given


def counts_of(weights: Sequence[float]) -> Sequence[float] | None:
    """Returns the numbers of examples that weights stand for; ``None`` if these are not known."""
    if isinstance(weights, GivenWeights):
        return weights.counts
    return weights if isinstance(weights, ExampleCounts) else None


def split_sizes(
    num_examples: int, num_replicas: int, weights: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Returns how many examples each replica gets, in replica order; they sum to all.

    Without weights at most one apart, the larger ones first, as ``torch.tensor_split`` has it.
    With weights in proportion to them, by largest remainders (Hamilton's method): everyone gets
    the whole part of its quota ``num_examples * weight / sum(weights)``, and what is left goes,
    one each, to the largest fractional parts, earlier replicas first. Quotas are computed exactly,
    and equal weights give equal parts as above.
    """
    if weights is None:
        size, num_larger = divmod(num_examples, num_replicas)
        return (size + 1,) * num_larger + (size,) * (num_replicas - num_larger)
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 is a tenth
    total = sum(exact)
    quotas = [num_examples * weight / total for weight in exact]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(num_replicas), key=lambda r: sizes[r] - quotas[r])
    for r in by_remainder[: num_examples - sum(sizes)]:
        sizes[r] += 1
    return tuple(sizes)


def batch_size(batch: Any) -> int:
    """Returns the first dimension that all batched leaves of a batch share.

    Batched leaves are tensors and numpy arrays of at least one dimension.

    Raises:
        BatchError: there is no batched leaf, their lengths differ, or one cannot be split.
    """
    shapes: dict[str, tuple[int, ...]] = {
        path: tuple(leaf.shape) for path, leaf in _leaves(batch, "batch") if is_batched(leaf)
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


def is_batched(leaf: object) -> bool:
    """Whether a leaf of a batch has a dimension of examples."""
    return isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0


def split_batch(
    batch: Any,
    devices: Sequence[torch.device],
    *,
    sizes: Sequence[int] | None = None,
    begin: int = 0,
    num_examples: int | None = None,
    weight_of: Callable[[Any], Any] | None = None,
    pin: Callable[[Tensor], Tensor] | None = None,
    copy: Copy = Tensor.to,
) -> Any:
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

    Each ``PerReplica`` has the numbers of examples as its ``weights``, or what ``weight_of``
    gives. A replica without examples has no part (``ABSENT``) of what was split, and sits out. If
    no example is for these (an empty batch, a worker without examples), the first replica gets the
    empty part with weight 0: it runs, since collectives need every worker.

    Args:
        sizes: of the parts; by default those of ``split_sizes``.
        begin: the example that the parts begin with; those before it, and those after the parts,
            are for others.
        num_examples: of the batch; ``None`` if all are for these.
        weight_of: gives a part's weight, see ``InputOptions``.
        pin: makes a whole tensor ready for ``copy`` of its parts.
        copy: brings a tensor to a device.

    Raises:
        BatchError: see ``batch_size``.
        ValueError: ``weight_of`` gave no finite number >= 0.
    """
    if sizes is None:
        sizes = split_sizes(batch_size(batch), len(devices))
    num_here = sum(sizes)
    num_examples = num_here if num_examples is None else num_examples
    bounds = list(zip(accumulate(sizes, initial=0), sizes, strict=False))

    def per_replica(part_of: Callable[[int, int], object]) -> PerReplica[Any]:
        return PerReplica(
            part_of(start, size) if size or (replica_id == 0 and num_here == 0) else ABSENT
            for replica_id, (start, size) in enumerate(bounds)
        )

    def split(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            if tree.ndim == 0:
                # Not one for all: what a replica does to its own in place must not reach others.
                return PerReplica([tree, *(tree.clone() for _ in devices[1:])])
            own = tree if num_here == num_examples else tree.narrow(0, begin, num_here)
            whole = own if pin is None else pin(own)
            return per_replica(lambda start, size: _narrow(whole, start, size))
        if isinstance(tree, np.ndarray) and tree.ndim:
            tensor = tree if pin is None else host_part(tree)
            if isinstance(tensor, Tensor):
                return split(tensor)
            array = tree[begin:]
            return per_replica(lambda start, size: host_part(array[start : start + size]))
        if is_strings(tree) and len(tree) == num_examples:
            strings = tree[begin:]
            return per_replica(lambda start, size: strings[start : start + size])
        children = children_of(tree)
        if children is None:
            return tree
        return rebuild_node(tree, {key: split(child) for key, child in children.items()})

    return place(split(batch), devices, sizes, weight_of=weight_of, copy=copy)


def place(
    parts: Any,
    devices: Sequence[torch.device],
    sizes: Sequence[int],
    *,
    weight_of: Callable[[Any], Any] | None,
    copy: Copy,
) -> Any:
    """Brings a batch whose ``PerReplica`` leaves are on the host to the devices, with weights."""
    weights: Sequence[float] = ExampleCounts(sizes)
    if weight_of is not None:
        given = [
            checked_weight(weight_of(select(parts, r)), r) if size else 0.0
            for r, size in enumerate(sizes)
        ]
        weights = GivenWeights.for_counts(given, sizes)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        values = [
            copy(part, device) if isinstance(part, Tensor) else part
            for part, device in zip(leaf.values, devices, strict=True)
        ]
        return PerReplica(values, weights=weights)

    return map_structure(move, parts)


def checked_weight(value: Any, replica_id: int) -> float:
    """Returns what ``weight_of`` gave as a number."""
    try:
        weight = float(value)
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(
            "weight_of must give a finite number >= 0, or a tensor of one element, for each "
            f"replica's part; for replica {replica_id} it gave {_summary(value)}"
        )
    return weight


def _narrow(tensor: Tensor, start: int, size: int) -> Tensor:
    # Not tensor_split: autograd forbids writing to one of several views that one call returned.
    part = tensor.narrow(0, start, size)
    # The rows of an expanded tensor are one and the same memory.
    return part.clone() if tensor.stride(0) == 0 and len(tensor) > 1 else part


def host_part(array: Any) -> Any:
    """Returns a numpy array as a tensor over its memory, or itself where torch has no dtype."""
    try:
        return _as_tensor(array)
    except TypeError:
        return array


def _as_tensor(array: Any) -> Tensor:
    """Raises ``TypeError`` where torch has no such dtype."""
    try:
        # Torch warns about read-only memory, since its tensors can always be written to.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except ValueError:  # a reversed or byte-swapped array
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


def is_strings(tree: Any) -> bool:
    """Whether something is a list or tuple of strings, the names of examples perhaps."""
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
    elif type(tree).__module__.partition(".")[0] in ("pandas", "polars"):
        what, advice = f"a {type(tree).__name__}", "pass its columns as numpy arrays or tensors"
    elif _hides_tensors(tree):
        what = f"a {type(tree).__name__}, which holds tensors,"
        advice = "pass its tensors in a dict, or make it a dataclass, and put it together in fn"
    else:
        return
    raise BatchError(f"{what} cannot be split over replicas; {path} is one; {advice}")


def _hides_tensors(tree: object) -> bool:
    """Whether an object of a class of the user's, no inner node, holds batched tensors."""
    if isinstance(tree, (Tensor, np.ndarray)) or children_of(tree) is not None:
        return False
    return any(map(is_batched, getattr(tree, "__dict__", {}).values()))


def _summary(batch: object) -> str:
    text = repr(batch)
    return text if len(text) <= 80 else f"{text[:77]}..."
