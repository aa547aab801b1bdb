"""Arguments of a step on TPUs: copied between torch and JAX, split over the devices, regrouped.

The user's model and optimizer state are ordinary torch tensors on the host, and they are the truth
between two runs. The devices have copies. Before a run, a tensor is sent again if its bits differ
from those that were last read back. After a run, all changed values are read back into the user's
tensors, in place. So checkpoints, ``state_dict``, evaluation on the host and other strategies see
current values without any notification. The cost of a run is a comparison of all tensors and a
transfer of the changed ones.

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
import torch
from torch import Tensor

from mirror.base.bitwise import same_bits
from mirror.errors import StrategyError, StructureError, short_repr
from mirror.strategy.distributed_values import regroup
from mirror.values import PerReplica, describe_structure, leaves_of, rebuild_structure, select

Key = Any


class TpuCopies:
    """The copies of tensors on the devices, equal on all of them.

    Args:
        jax: the module.
        sharding: the sharding that gives each device the whole tensor.

    Attributes:
        sent: the number of tensors that were sent to the devices so far.
    """

    def __init__(self, jax: Any, sharding: Any) -> None:
        self._jax, self._sharding = jax, sharding
        self._known: dict[Key, tuple[Tensor, Any]] = {}
        self.sent = 0

    def device_copy(self, key: Key, tensor: Tensor) -> Any:
        """Returns the device array with a tensor's current values."""
        known = self._known.get(key)
        if known is None or not same_bits(known[0], tensor):
            self.sent += 1
            known = tensor.detach().clone(), self._jax.device_put(to_numpy(tensor), self._sharding)
            self._known[key] = known
        return known[1]

    def put(self, key: Key, array: Any, tensor: Tensor) -> None:
        """Records the new array of a tensor, and writes its values into the user's tensor."""
        values = from_numpy(np.asarray(array))
        with torch.no_grad():
            tensor.copy_(values)
        self._known[key] = values, array

    def clear(self) -> None:
        """Drops all copies."""
        self._known.clear()

    def arrays(self) -> dict[Key, Any]:
        """Returns all arrays by key."""
        return {key: array for key, (_, array) in self._known.items()}


def to_numpy(tensor: Tensor) -> Any:
    """Returns a tensor's values as an array with its own memory, for jax."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes  # a dependency of jax

        return tensor.contiguous().view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
    return np.array(tensor.numpy())


def from_numpy(array: Any) -> Tensor:
    """Returns an array's values as a tensor with its own memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


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


class ProgramOutput:
    """The outputs of one branch of a program.

    Attributes:
        tree: their structure; its leaves have no meaning.
        leaves: for each leaf an object with its shape and dtype, or a list with the value itself.
    """

    def __init__(self, tree: Any, leaves: list[Any]) -> None:
        self.tree, self.leaves = tree, leaves


def split_arrays(env: Any, result: Any) -> tuple[list[Any], ProgramOutput]:
    """Returns the arrays of a step's result, and its other leaves with ``None`` for each array."""
    arrays: list[Any] = []
    leaves: list[Any] = []
    for leaf in leaves_of(result):
        if hasattr(leaf, "jax"):  # a tensor of torchax, or a view of one
            arrays.append(env.t2j_iso(leaf))
            leaves.append(None)
        else:
            leaves.append([leaf])
    return arrays, ProgramOutput(result, leaves)


def find_widest(outputs: Sequence[ProgramOutput | None]) -> list[tuple[tuple[int, ...], Any]]:
    """Returns shape and dtype of each output array, the largest of all branches.

    Raises:
        StructureError: the branches differ in structure, or in more than sizes.
    """
    present = [output for output in outputs if output is not None]
    structures = {describe_structure(output.tree) for output in present}
    if len(structures) > 1:
        raise StructureError(
            f"the replicas returned different structures, {' and '.join(sorted(structures))}; "
            "return the same structure for any number of examples"
        )
    widest = []
    for leaves in zip(*(output.leaves for output in present), strict=True):
        if all(type(leaf) is list for leaf in leaves):
            continue
        kinds = {_kind(leaf) for leaf in leaves}
        if len(kinds) > 1:
            raise StructureError(
                "an output must be of one dtype and number of dimensions for any number of "
                f"examples; got {' and '.join(sorted(kinds))}; convert it in the step"
            )
        shape = tuple(max(sizes) for sizes in zip(*(x.shape for x in leaves), strict=True))
        widest.append((shape, leaves[0].dtype))
    return widest


def _kind(leaf: Any) -> str:
    if type(leaf) is list:
        return short_repr(leaf[0])
    return f"a {leaf.dtype} tensor of {len(leaf.shape)} dimensions"


def regroup_outputs(
    outputs: Sequence[Any], arrays: Sequence[Any], arguments: TpuArguments, refusal: str | None
) -> Any:
    """Returns a run's results regrouped.

    Args:
        outputs: the output of each kind of replica; ``None`` for an idle one.
        arrays: the padded results of all replicas, stacked.
        refusal: the reason in the error of a backward pass from a result; ``None`` allows it.
    """
    host: list[Any] = [np.asarray(array) for array in arrays]
    results: dict[int, Any] = {}
    for r, k in enumerate(arguments.which):
        output = outputs[k]
        if output is None:
            continue
        found, leaves = iter(host), []
        for leaf in output.leaves:
            if type(leaf) is list:
                leaves.append(leaf[0])
                continue
            region: Any = (r, *map(slice, leaf.shape))
            leaves.append(_tensor(next(found)[region], refusal))
        results[r] = rebuild_structure(output.tree, leaves)
    return regroup(results, len(arguments.which), arguments.counts)


def _tensor(array: Any, refusal: str | None) -> Tensor:
    value = from_numpy(np.asarray(array))
    if refusal is None or not value.is_floating_point():
        return value
    refused: Tensor = _refused(value, refusal, torch.zeros((), requires_grad=True))
    return refused


class _RefusedGradient(torch.autograd.Function):
    """Returns a value unchanged, and raises StrategyError in a backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, refusal: str, anchor: Tensor) -> Tensor:
        ctx.refusal = refusal
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise StrategyError(f"backward outside of run: {ctx.refusal}")


_refused: Any = _RefusedGradient.apply  # untyped
