"""Distributes batches over the replicas: splits a global batch, or joins one batch per replica.

All splits of the package follow ``split_sizes``.
The replicas' shares of a batch are fixed, or follow the measured speed of their devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data.input_options import InputOptions
from mirror.errors import BatchError, StructureError
from mirror.values import (
    ABSENT,
    ExampleCounts,
    GivenWeights,
    PerReplica,
    children_of,
    is_number,
    leaves_of,
    map_structure,
    rebuild_node,
    select,
)

Copy = Callable[[Tensor, torch.device], Tensor]


@lru_cache(maxsize=256)  # split calls of models have few sizes
def split_evenly(num_examples: int, num_replicas: int) -> tuple[int, ...]:
    """Returns sizes of parts that differ by at most one, the larger parts first."""
    size, num_larger = divmod(num_examples, num_replicas)
    return (size + 1,) * num_larger + (size,) * (num_replicas - num_larger)


def split_sizes(
    num_examples: int, num_replicas: int, weights: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Returns the number of examples of each replica, in replica order; their sum is the total.

    Without weights, parts differ by at most one, the larger parts first, as in
    ``torch.tensor_split``. With weights, parts are proportional by largest remainders (Hamilton's
    method): each replica gets the whole part of its quota ``num_examples * weight /
    sum(weights)``. The rest goes, one example each, to the largest fractional parts, earlier
    replicas first. Quotas are computed exactly, and equal weights give the parts without weights.
    """
    if weights is None:
        return split_evenly(num_examples, num_replicas)
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 is a tenth
    total = sum(exact)
    quotas = [num_examples * weight / total for weight in exact]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(num_replicas), key=lambda r: sizes[r] - quotas[r])
    for r in by_remainder[: num_examples - sum(sizes)]:
        sizes[r] += 1
    return tuple(sizes)


def batch_size(batch: Any) -> int:
    """Returns the size of the first dimension of all batched leaves of a batch.

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
            "all tensors and arrays of a batch must have the same number of examples as their "
            f"first dimension; got {found}; pass a value that belongs to no example as a 0-d "
            "tensor, or outside the batch"
        )
    return lengths.pop()


def is_batched(leaf: object) -> bool:
    """Returns whether a leaf of a batch has a dimension of examples."""
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
    list or tuple of ``batch_size``       ``PerReplica`` of its parts, lists or tuples: names
    strings, nothing else                 of the examples, as ``default_collate`` returns them
    0-d tensor                            ``PerReplica`` of the whole on every device
    anything else                         itself: every replica gets it
    ====================================  ====================================================

    Any other list or tuple is structure: every replica gets a list of numbers whole, and also
    strings that differ in number from the examples.

    Each ``PerReplica`` has as ``weights`` the numbers of examples, or the results of
    ``weight_of``. A replica without examples is idle: its part of split leaves is ``ABSENT``. If
    all these replicas are without examples (an empty batch, or one for other workers), the first
    one gets the empty part with weight 0. It runs, since collectives need every worker.

    Args:
        sizes: the sizes of the parts; by default those of ``split_sizes``.
        begin: the first example of the first part; other workers get the examples before it and
            after the parts.
        num_examples: the number of examples in the batch; by default the sum of ``sizes``.
        weight_of: computes a part's weight, see ``InputOptions``.
        pin: prepares a whole tensor for ``copy`` of its parts.
        copy: copies a tensor to a device.

    Raises:
        BatchError: the batch has no examples' dimension, or cannot be split, see ``batch_size``.
        ValueError: ``weight_of`` has not returned a finite number >= 0.
    """
    if sizes is None:
        sizes = split_sizes(batch_size(batch), len(devices))
    num_local = sum(sizes)
    num_examples = num_local if num_examples is None else num_examples
    bounds = list(zip(accumulate(sizes, initial=0), sizes, strict=False))

    def make_parts(part_of: Callable[[int, int], object]) -> PerReplica[Any]:
        return PerReplica(
            part_of(start, size) if size or (replica_id == 0 and num_local == 0) else ABSENT
            for replica_id, (start, size) in enumerate(bounds)
        )

    def split(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            if tree.ndim == 0:
                # Copies, so that an in-place change by one replica does not reach the others.
                return PerReplica([tree, *(tree.clone() for _ in devices[1:])])
            own = tree if num_local == num_examples else tree.narrow(0, begin, num_local)
            whole = own if pin is None else pin(own)
            return make_parts(lambda start, size: _narrow(whole, start, size))
        if isinstance(tree, np.ndarray) and tree.ndim:
            tensor = tree if pin is None else host_part(tree)
            if isinstance(tensor, Tensor):
                return split(tensor)
            array = tree[begin:]
            return make_parts(lambda start, size: host_part(array[start : start + size]))
        if is_strings(tree) and len(tree) == num_examples:
            strings = tree[begin:]
            return make_parts(lambda start, size: strings[start : start + size])
        children = children_of(tree)
        if children is None:
            return tree
        return rebuild_node(tree, {key: split(child) for key, child in children.items()})

    return place_parts(split(batch), devices, sizes, weight_of=weight_of, copy=copy)


def join_batches(
    batches: Sequence[Any],
    devices: Sequence[torch.device],
    sizes: Sequence[int],
    *,
    weight_of: Callable[[Any], Any] | None = None,
    copy: Copy = Tensor.to,
) -> Any:
    """Distributes batches to the replicas in order, each on its device.

    Tensors, NumPy arrays and numbers become ``PerReplica``. Another leaf is unchanged if it is the
    same object in all batches. Replicas without a batch have no part.

    Args:
        batches: at most one per replica.
        sizes: the batches' numbers of examples, see ``count_examples``; they are the ``weights``
            unless ``weight_of`` returns others.

    Raises:
        BatchError: the batches differ in structure.
        ValueError: ``weight_of`` has not returned a finite number >= 0.
    """
    missing = [ABSENT] * (len(devices) - len(batches))

    def join(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, Tensor) and not is_number(first):
            if all(leaf is first for leaf in leaves):
                return first
        parts = [host_part(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        return PerReplica([*parts, *missing])

    try:
        parts = map_structure(join, *batches)
    except StructureError as error:
        raise BatchError(
            f"the batches of one step must have one structure, one batch per replica; {error}"
        ) from None
    return place_parts(parts, devices, sizes, weight_of=weight_of, copy=copy)


def count_examples(batch: Any) -> int:
    """Returns a batch's number of examples; 1 for a batch of single values.

    Raises:
        BatchError: see ``batch_size``.
    """
    return batch_size(batch) if any(is_batched(leaf) for leaf in leaves_of(batch)) else 1


def place_parts(
    parts: Any,
    devices: Sequence[torch.device],
    sizes: Sequence[int],
    *,
    weight_of: Callable[[Any], Any] | None,
    copy: Copy,
) -> Any:
    """Copies the host parts of a batch to their devices, and adds the replicas' weights."""
    weights: Sequence[float] = ExampleCounts(sizes)
    if weight_of is not None:
        given = [
            check_batch_weight(weight_of(select(parts, r)), r) if size else 0.0
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


def check_batch_weight(value: Any, replica_id: int) -> float:
    """Returns the result of ``weight_of`` as a number.

    Raises:
        ValueError: it is not a finite number >= 0.
    """
    try:
        weight = float(value)
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(
            "weight_of must return a finite number >= 0, or a tensor of one element, for each "
            f"replica's part; for replica {replica_id} it returned {_summary(value)}"
        )
    return weight


def _narrow(tensor: Tensor, start: int, size: int) -> Tensor:
    # Not tensor_split: autograd forbids in-place changes of views that one call has returned.
    # Not a view of the batch's own: one part's change would make autograd refuse the others.
    is_alone = type(tensor) is Tensor and not tensor.requires_grad
    part = (tensor.data if is_alone else tensor).narrow(0, start, size)
    # The rows of an expanded tensor share one memory.
    return part.clone() if tensor.stride(0) == 0 and len(tensor) > 1 else part


def host_part(array: Any) -> Any:
    """Returns an array as a tensor over its memory; the array itself if torch lacks its dtype."""
    try:
        return _as_tensor(array)
    except TypeError:
        return array


def _as_tensor(array: Any) -> Tensor:
    """Returns an array as a tensor; raises ``TypeError`` if torch lacks its dtype."""
    try:
        # torch warns about read-only memory, since its tensors are always writable.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except ValueError:  # a reversed or byte-swapped array
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


def is_strings(tree: Any) -> bool:
    """Returns whether a node is a list or tuple of strings, which may be names of examples."""
    return type(tree) in (list, tuple) and all(isinstance(item, (str, bytes)) for item in tree)


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a batch with their paths, such as ``batch['image'][0]``."""
    _check_splittable(tree, path)
    children = None if isinstance(tree, Tensor) else children_of(tree)
    if children is None:
        yield path, tree
        return
    for key, child in children.items():
        step = f".{key}" if dataclasses.is_dataclass(tree) else f"[{key!r}]"
        yield from _leaves(child, path + step)


def _check_splittable(tree: object, path: str) -> None:
    if isinstance(tree, PackedSequence):
        what, advice = "a PackedSequence", "pass the padded tensor and the lengths, and pack in fn"
    elif isinstance(tree, PerReplica):
        what, advice = "a PerReplica", "pass the global batch, before its distribution"
    elif isinstance(tree, Tensor) and (tree.layout is not torch.strided or tree.is_nested):
        kind = "nested" if tree.is_nested else str(tree.layout).removeprefix("torch.")
        what, advice = f"a {kind} tensor", "pass a dense tensor, and convert it in fn"
    elif type(tree).__module__.partition(".")[0] in ("pandas", "polars"):
        what, advice = f"a {type(tree).__name__}", "pass its columns as numpy arrays or tensors"
    elif _hides_tensors(tree):
        what = f"a {type(tree).__name__}, which holds tensors,"
        advice = "pass its tensors in a dict, or make it a dataclass, and construct it in fn"
    else:
        return
    raise BatchError(f"{what} cannot be split over replicas; {path} is one; {advice}")


def _hides_tensors(tree: object) -> bool:
    """Returns whether an object of a user's class, which is a leaf here, holds batched tensors."""
    if isinstance(tree, (Tensor, np.ndarray)) or children_of(tree) is not None:
        return False
    return any(map(is_batched, getattr(tree, "__dict__", {}).values()))


def _summary(batch: object) -> str:
    text = repr(batch)
    return text if len(text) <= 80 else f"{text[:77]}..."


# The number of steps over which speeds are measured before the shares may change.
STEPS = 10
# The least gain, as a part of a step's time, for which shares change; less may be noise.
MIN_GAIN = 0.05
# The part of the way to the measured optimum that shares move in one change.
STRIDE = 0.5


def make_balance(
    options: InputOptions,
    workers: LocalWorkerGroup,
    num_local: int,
    *,
    joins: bool,
    measure: Callable[[], Callable[[], Sequence[float]]] | None,
) -> Balance | FixedBalance:
    """Returns the balance for the options: fixed for all workers' replicas, measured for local.

    Raises:
        ValueError: the weights do not fit the replicas, or ``joins``.
    """
    weights = options.weights
    if weights is None:
        return FixedBalance()
    if joins:
        raise ValueError(
            "weights split global batches; with distribute_dataset_from_function each batch is "
            "for one replica: create batches of different sizes instead"
        )
    if isinstance(weights, str):
        if measure is None:
            raise ValueError("weights='auto' needs a strategy that measures its replicas")
        if workers.is_multi_process and options.sharding != "off":
            raise ValueError(
                "weights='auto' follows this worker's measurements, but all workers must split a "
                "batch in the same way; give one number per replica of all workers, or let each "
                "worker read its own batches with sharding='off'"
            )
        return Balance(num_local, measure())
    if len(weights) != workers.num_replicas:
        raise ValueError(
            f"weights must be one per replica, {workers.num_replicas} of them; got "
            f"{len(weights)}: {weights}"
        )
    return FixedBalance(weights)


class Balance:
    """Splits batches so that the replicas finish together; see ``InputOptions(weights="auto")``.

    Shares start equal. The time that each replica needs per example is measured over ``STEPS``
    steps. If shares by speed would save the slowest replica more than ``MIN_GAIN``, the shares
    move ``STRIDE`` of the way there, and the measurement starts again. Results stay exact, since
    gradients are weighted by the numbers of examples. But the assignment of examples to replicas
    depends on the clock, so two runs are no longer equal bit for bit.

    Args:
        num_replicas: the number of the strategy's replicas.
        busy_seconds: returns the time, in seconds, that each replica has computed so far.
    """

    def __init__(self, num_replicas: int, busy_seconds: Callable[[], Sequence[float]]) -> None:
        self._busy_seconds = busy_seconds
        self._shares = (1.0 / num_replicas,) * num_replicas
        self._steps = 0
        self._busy_at_start: tuple[float, ...] = ()
        self._examples = [0] * num_replicas

    @property
    def shares(self) -> tuple[float, ...]:
        """The replicas' shares of a batch; they sum to 1."""
        return self._shares

    def record(self, sizes: Sequence[int]) -> None:
        """Records the start of a step on parts of these sizes, and the end of the last step."""
        if self._steps == STEPS:
            self._adapt()
            self._steps = 0
        if self._steps == 0:
            self._busy_at_start = tuple(self._busy_seconds())
            self._examples = [0] * len(self._shares)
        self._steps += 1
        self._examples = [a + b for a, b in zip(self._examples, sizes, strict=True)]

    def _adapt(self) -> None:
        busy = [b - a for a, b in zip(self._busy_at_start, self._busy_seconds(), strict=True)]
        if not all(self._examples) or not all(seconds > 0 for seconds in busy):
            return  # a replica was idle, or nothing ran on the replicas: speeds are unknown
        speeds = [n / seconds for n, seconds in zip(self._examples, busy, strict=True)]
        best = [speed / sum(speeds) for speed in speeds]
        slowest = max(busy)
        possible = sum(self._examples) / sum(speeds)
        if possible > slowest * (1 - MIN_GAIN):
            return
        self._shares = tuple(
            share + STRIDE * (b - share) for share, b in zip(self._shares, best, strict=True)
        )


@dataclass(frozen=True)
class FixedBalance:
    """Fixed shares.

    Attributes:
        shares: the replicas' shares of a batch; ``None`` for equal shares.
    """

    shares: Sequence[float] | None = None
