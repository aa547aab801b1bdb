"""VaryingInputs: the values that have differed between the calls of a step, and are inputs.

As with ``torch.compile``, a number or a size is a constant of a trace until it has had a second
value. So a program that trains on batches of one shape is compiled for that shape, and a program
with sequences of many lengths is traced twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

Option = tuple[Optimizer, int, str]


class VaryingInputs:
    """Compares the arguments and options of each call with those of earlier calls."""

    def __init__(self) -> None:
        self._structure: Any = None
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._values: dict[int, Any] = {}
        self._dimensions: set[tuple[int, int]] = set()
        self._numbers: set[int] = set()
        self._known_options: WeakKeyDictionary[Optimizer, dict[tuple[int, str], Any]] = (
            WeakKeyDictionary()
        )
        self._options: WeakKeyDictionary[Optimizer, set[tuple[int, str]]] = WeakKeyDictionary()

    def observe_arguments(
        self, structure: Any, columns: Sequence[Sequence[Any]], own: Sequence[bool]
    ) -> None:
        """Compares arguments with earlier ones.

        Args:
            columns: for each leaf, the values of the replicas that take part.
            own: for each leaf, whether every replica has its own.
        """
        if structure != self._structure:
            self._structure = structure
            self._shapes, self._values = {}, {}
            self._dimensions, self._numbers = set(), set()
        for leaf, (column, is_own) in enumerate(zip(columns, own, strict=True)):
            for value in column:
                if isinstance(value, Tensor):
                    self._observe_shape(leaf, tuple(value.shape), is_own=is_own)
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    if self._values.setdefault(leaf, value) != value:
                        self._numbers.add(leaf)
                    self._values[leaf] = value

    def _observe_shape(self, leaf: int, shape: tuple[int, ...], *, is_own: bool) -> None:
        before = self._shapes.get(leaf)
        self._shapes[leaf] = shape
        if before is not None and len(before) == len(shape):
            for dim, (size, other) in enumerate(zip(before, shape, strict=True)):
                if size != other and not (is_own and dim == 0):  # a batch has any size
                    self._dimensions.add((leaf, dim))

    def observe_options(self, optimizers: Iterable[Optimizer]) -> None:
        """Compares the options of optimizers with earlier ones."""
        for optimizer in optimizers:
            self.compare_options(optimizer, optimizer.param_groups)

    def compare_options(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
        """Compares the options of one optimizer, as of some time, with earlier ones."""
        known = self._known_options.setdefault(optimizer, {})
        for i, group in enumerate(groups):
            for name, value in group.items():
                if name == "params" or isinstance(value, bool):
                    continue
                if isinstance(value, (int, float, tuple)):
                    if known.setdefault((i, name), value) != value:
                        self._options.setdefault(optimizer, set()).add((i, name))
                    known[i, name] = value

    def dimensions(self, leaf: int) -> list[int]:
        """Returns the dimensions of an argument that have had several sizes."""
        return [dim for one, dim in self._dimensions if one == leaf]

    def is_number(self, leaf: int) -> bool:
        """Whether a number among the arguments has had several values."""
        return leaf in self._numbers

    def is_option(self, optimizer: Optimizer, group: int, name: str) -> bool:
        """Whether an option of an optimizer has had several values."""
        return (group, name) in self._options.get(optimizer, ())

    def copy_without_numbers(self) -> VaryingInputs:
        """Returns a copy for a trace in which all numbers are constants."""
        found = VaryingInputs()
        found._dimensions = self._dimensions
        return found
