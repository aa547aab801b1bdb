"""StepArguments: the arguments of a compiled call, by leaf and by replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mirror.compiler.free_variables import make_comparable
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.values import (
    PerReplica,
    children_of,
    describe_structure,
    leaves_of,
    map_structure,
)

_LEAVES = (Tensor, PerReplica, int, float, str, type(None))


class ArgumentVariable:
    """A parameter or mirrored buffer among the arguments, compared by identity.

    It is no input of a program: the step uses it as one that it finds outside its arguments.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArgumentVariable) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


class StepArguments:
    """The arguments of one call; work per replica is in list operations of the interpreter.

    Attributes:
        active: the replicas that take part.
        own: for each leaf, whether every replica has its own.
        signatures: for each replica, the properties of its leaves that a program depends on.
        tensors: for each replica, the tensors among its leaves.
        columns: for each leaf, its value on each replica that takes part. A parameter or mirrored
            buffer is an ``ArgumentVariable``.
    """

    def __init__(self, args: Any, kwargs: Any, active: Sequence[int]) -> None:
        self._tree = (args, kwargs)
        self.active = tuple(active)
        self.own: list[bool] = []
        self.columns: list[list[Any]] = []
        self._structures: list[str] = []
        tensors: list[list[Any]] = []
        entries: list[list[Any]] = []
        for leaf in leaves_of(self._tree):
            for column in self._columns_of(leaf):
                self.columns.append(column)
                self.own.append(isinstance(leaf, PerReplica))
                if isinstance(column[0], Tensor):
                    tensors.append(column)
                    entries.append(
                        [(t.shape, t.dtype, t.is_contiguous(), t.requires_grad) for t in column]
                    )
                else:
                    entries.append([(type(value), _key(value)) for value in column])
        num = len(self.active)
        self.signatures = list(zip(*entries, strict=True)) if entries else [()] * num
        rows = list(zip(*tensors, strict=True)) if tensors else [()] * num
        self.tensors = dict(zip(self.active, rows, strict=True))

    def _columns_of(self, leaf: Any) -> list[list[Any]]:
        """Returns, for each leaf of the replicas' parts, the values of those that take part."""
        if isinstance(leaf, (nn.Parameter, MirroredTensor)):
            leaf = ArgumentVariable(leaf)
        if not isinstance(leaf, PerReplica):
            return [[leaf] * len(self.active)]
        parts = [leaf.values[r] for r in self.active]
        if isinstance(parts[0], Tensor):
            return [[t if t.is_contiguous() else _fix_layout(t) for t in parts]]
        if children_of(parts[0]) is not None:
            self._structures += map(describe_structure, parts)
        return [list(column) for column in zip(*map(leaves_of, parts), strict=True)]

    def leaves(self, signature: Any) -> list[Any]:
        """Returns the leaves of a replica that has this signature."""
        row = self.signatures.index(signature)
        return [column[row] for column in self.columns]

    @property
    def structure(self) -> Any:
        """A key for the structure around the leaves."""
        args, kwargs = self._tree
        if not kwargs and all(isinstance(arg, _LEAVES) for arg in args) and not self._structures:
            return len(args)
        return describe_structure(self._tree), *self._structures

    def names(self) -> list[str]:
        """Returns a name for each leaf, for messages."""
        args, kwargs = self._tree
        named = [*((f"argument {i}", arg) for i, arg in enumerate(args))]
        named += [(f"argument {name!r}", value) for name, value in kwargs.items()]
        return [leaf for name, value in named for leaf in _named_leaves(name, value)]

    def plain_leaves(self) -> list[dict[int, Any]]:
        """Returns, for each replica that takes part, its leaves that are not tensors."""
        found = [(i, c) for i, c in enumerate(self.columns) if not isinstance(c[0], Tensor)]
        return [{i: c[row] for i, c in found} for row in range(len(self.active))]

    def must_get_gradients_uncompiled(self) -> bool:
        """Whether a tensor has a gradient, or requires one on several replicas.

        The step may read or replace the first; the second is an error, as in ``strategy.run``.
        """
        wanted = [t for row in self.tensors.values() for t in row if t.requires_grad]
        has_gradient = any(t.is_leaf and t.grad is not None for t in wanted)
        return has_gradient or len({*map(id, wanted)}) < len(wanted)

    def is_odd(self) -> bool:
        """Whether any replica has a single example, or none."""
        return self._has_fewer_than(2)

    def has_empty(self) -> bool:
        """Whether any replica has no example."""
        return self._has_fewer_than(1)

    def _has_fewer_than(self, num_examples: int) -> bool:
        return any(
            len(entry) == 4 and len(entry[0]) and entry[0][0] < num_examples and own
            for signature in self.signatures
            for entry, own in zip(signature, self.own, strict=True)
        )

    def caller(self, step: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
        """Returns a function that calls ``step`` with given leaves instead of a replica's."""
        tree = self._tree

        def call(leaves: Sequence[Any]) -> Any:
            found = iter([one.tensor if type(one) is ArgumentVariable else one for one in leaves])
            args, kwargs = map_structure(lambda leaf: _take(leaf, found), tree)
            return step(*args, **kwargs)

        return call


def _named_leaves(name: str, tree: Any) -> list[str]:
    """Returns a name for each leaf of one argument, as its replicas have it."""
    children = None if isinstance(tree, (Tensor, PerReplica)) else children_of(tree)
    if children is not None:
        found = [_named_leaves(f"{name}[{key!r}]", child) for key, child in children.items()]
        return [one for names in found for one in names]
    if isinstance(tree, PerReplica):
        _, part = next(tree.parts())
        return [name] if isinstance(part, Tensor) else _named_leaves(name, part)
    return [name]


def _take(leaf: Any, found: Iterator[Any]) -> Any:
    if isinstance(leaf, PerReplica):
        _, part = next(leaf.parts())
        return map_structure(lambda _: next(found), part)
    return next(found)


def _fix_layout(tensor: Tensor) -> Tensor:
    """Returns a tensor in a layout that programs take: contiguous, or channels last."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return tensor.contiguous()


def _key(value: Any) -> Any:
    if type(value) is ArgumentVariable or make_comparable(value) is value:
        return value
    return id(value)
