"""Converts the arguments of a run to arrays, and pads parts of different sizes.

[Note: Parts of different sizes]
A program has one shape for all replicas, but the parts of a batch may differ: 3, 3, 2 and 2
examples, or none for an idle replica. Padded examples must not count in any mean, statistic or
number of rows. So each part is padded to the largest shape, and the program has a branch for each
size. A branch cuts the replica's part to its true size, and the step is traced with that shape.
Outputs are padded too, and cut on the host. A batch with parts of one size needs no branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from mirror.errors import StructureError, short_repr
from mirror.integrations.tpu.tpu_copies import to_numpy
from mirror.values import PerReplica, leaves_of, rebuild_structure, select

Shapes = tuple[tuple[int, ...], ...]
_STATIC = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class TpuArguments:
    """The arguments of one run.

    Attributes:
        tree: the structure of args and kwargs, with one replica's leaves.
        kinds: for each leaf "part", "shared", or a tuple with the value itself.
        sizes: for each kind of replica the shapes of its parts; ``None`` for an idle replica.
        which: the kind of each replica, an index of ``sizes``.
        parts: the stacked and padded parts, one array per leaf that has parts.
        shared: the arrays that are equal on all replicas.
        counts: each replica's weight.
    """

    tree: Any
    kinds: tuple[Any, ...]
    sizes: tuple[Shapes | None, ...]
    which: tuple[int, ...]
    parts: list[Any] = field(compare=False)
    shared: list[Any] = field(compare=False)
    counts: tuple[float, ...]

    @property
    def key(self) -> Any:
        """The facts of the arguments that a program depends on."""
        arrays = [(tuple(a.shape), str(a.dtype)) for a in (*self.parts, *self.shared)]
        return self.kinds, self.sizes, tuple(arrays)

    def rebuild(self, parts: Sequence[Any], shared: Sequence[Any]) -> Any:
        """Returns args and kwargs with a replica's tensors."""
        own, common = iter(parts), iter(shared)
        leaves = [
            next(own) if kind == "part" else next(common) if kind == "shared" else kind[0]
            for kind in self.kinds
        ]
        return rebuild_structure(self.tree, leaves)


def make_arguments(
    trees: Any, active: Sequence[int], weights: Sequence[float] | None, num_replicas: int
) -> TpuArguments:
    """Returns the arguments of a run as arrays on the host.

    Raises:
        StructureError: a part is no tensor, or parts differ in more than their sizes.
    """
    tree = select(trees, active[0])
    kinds: list[Any] = []
    shared: list[Any] = []
    rows: list[list[Any]] = []
    for leaf in leaves_of(trees):
        if isinstance(leaf, PerReplica):
            kinds.append("part")
            rows.append([_as_array(leaf.values[r]) for r in active])
            _check_same_kind(rows[-1])
        elif isinstance(leaf, (Tensor, np.ndarray)):
            kinds.append("shared")
            shared.append(_as_array(leaf))
        else:
            kinds.append((leaf,))
    found: dict[Shapes | None, int] = {}
    which = [0] * num_replicas
    for i, r in enumerate(active):
        shapes = tuple(row[i].shape for row in rows)
        which[r] = found.setdefault(shapes, len(found))
    absent = [r for r in range(num_replicas) if r not in active]
    for r in absent:
        which[r] = found.setdefault(None, len(found))
    parts = [_stack_padded(row, active, num_replicas) for row in rows]
    every = [1.0] * num_replicas if weights is None else [float(w) for w in weights]
    counts = tuple(0.0 if r in absent else every[r] for r in range(num_replicas))
    return TpuArguments(tree, tuple(kinds), tuple(found), tuple(which), parts, shared, counts)


def _as_array(value: Any) -> Any:
    if isinstance(value, Tensor):
        return to_numpy(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return np.array(value)
    raise StructureError(
        "a step for TPUs is one program, so values that differ between replicas must be tensors; "
        f"a PerReplica argument has {short_repr(value)}; make it a tensor, or equal for all"
    )


def _check_same_kind(arrays: Sequence[Any]) -> None:
    kinds = {(array.ndim, str(array.dtype)) for array in arrays}
    if len(kinds) > 1:
        raise StructureError(
            "the parts of an argument differ in dtype or number of dimensions: "
            f"{sorted(map(str, kinds))}; a step for TPUs is one program"
        )


def _stack_padded(arrays: Sequence[Any], active: Sequence[int], num_replicas: int) -> Any:
    """Returns the parts of all replicas, stacked, padded with zeros."""
    largest = tuple(np.max([array.shape for array in arrays], axis=0).astype(int))
    stacked: Any = np.zeros((num_replicas, *largest), arrays[0].dtype)
    for r, array in zip(active, arrays, strict=True):
        region: Any = (r, *map(slice, array.shape))
        stacked[region] = array
    return stacked


def is_static(value: Any) -> bool:
    """Returns whether a value can be compared, so that a new value leads to a new program."""
    if type(value) in (tuple, list):
        return all(map(is_static, value))
    return isinstance(value, _STATIC)
