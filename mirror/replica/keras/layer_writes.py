"""Records the variables that a replica's call of a Keras layer assigns, and merges the values.

[Note: State of Keras layers]
A Keras layer keeps moving statistics, seeds and counters in variables that its call assigns. On a
replica the outermost call runs in a ``keras.StatelessScope``, which records the values instead of
assigning them. After all replicas have called, each variable is assigned once:

    a variable                      its new value
    a seed                          the first replica's; each replica draws from its own seed
    ``aggregation="sum"``           the old value, plus the sum of the changes
    ``"only_first_replica"``        the first replica's
    other floats                    the mean, weighted by examples
    other integers                  the value, if all are equal; the old value plus the sum of the
                                    changes, if these are the numbers of examples
    a trainable variable            StrategyError: its gradient belongs to the old value
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mirror.errors import StrategyError
from mirror.replica.collectives.reduce_ops import weighted_mean
from mirror.replica.keras.keras_library import library

_STRIDE = 0x1000003  # between replicas' seeds; larger than the counter that Keras adds to a seed
_SEED = "seed_generator_state"
_COUNTS = "_mirror_counts_examples"  # an attribute of variables, set once it is known


class LayerWrites:
    """The values that one replica's call has assigned, and the losses that it has added.

    Attributes:
        variables: the assigned variables in order, by id.
        values: the assigned values, by id of the variable.
        losses: the losses of ``add_loss`` and activity regularizers.
    """

    def __init__(self, replica_id: int) -> None:
        self.replica_id = replica_id
        self.variables: dict[int, Any] = {}
        self.values: dict[int, Tensor] = {}
        self.losses: list[Tensor] = []
        self._is_reading = False

    def call_layer(self, call: Callable[[], Any]) -> Any:
        """Returns the result of a call, and records its assignments instead of making them."""
        scope = _scope_class()(self)
        with scope:
            result = call()
        self.losses = list(scope.losses)
        return result

    def read(self, variable: Any, value: Any) -> Any:
        """Returns a variable's value on this replica; ``None`` for its true value."""
        if value is not None or self._is_reading or variable.name != _SEED or not self.replica_id:
            return value
        self._is_reading = True
        try:
            seed = variable.value
        finally:
            self._is_reading = False
        return seed + seed.new_tensor([(self.replica_id * _STRIDE) & 0x7FFFFFFF, 0])

    def write(self, variable: Any, value: Tensor) -> None:
        """Records an assignment.

        Raises:
            StrategyError: the variable is trainable.
        """
        if variable.trainable:
            raise StrategyError(
                f"the call of a Keras layer assigns trainable variable {variable.path!r}, a "
                "different value on each replica; assign it outside the call, in train_step or "
                "in a callback, or create it with trainable=False"
            )
        self.variables[id(variable)] = variable
        self.values[id(variable)] = value.detach()


def assign_merged(
    written: Sequence[LayerWrites],
    sizes: Sequence[float],
    device: torch.device,
    *,
    counted: bool = True,
) -> None:
    """Assigns each variable once, with the merged value; in the cross-replica context.

    Args:
        written: the assignments of each replica that has called.
        sizes: these replicas' numbers of examples.
        device: the device of the variables.
        counted: whether the sizes are true numbers of examples, not just equal weights.
    """
    variables = {key: v for one in written for key, v in one.variables.items()}
    for key, variable in variables.items():
        before = variable.value.detach()
        values = [one.values.get(key, before).to(device) for one in written]
        if variable.name == _SEED and key not in written[0].values:
            continue
        variable.assign(_join(variable, before, values, sizes, counted))


def _join(
    variable: Any, before: Tensor, values: list[Tensor], sizes: Sequence[float], counted: bool
) -> Tensor:
    first = values[0]
    if variable.name == _SEED or variable.aggregation == "only_first_replica":
        return first
    if variable.aggregation == "sum":
        return torch.stack([before, *(value - before for value in values)]).sum(0).to(before.dtype)
    are_equal = all(torch.equal(first, value) for value in values[1:])
    if before.is_floating_point():
        return first if are_equal else weighted_mean(values, sizes)
    if before.dtype != torch.bool:
        changes = [value - before for value in values]
        counts_examples = counted and all(
            bool((change == size).all()) for change, size in zip(changes, sizes, strict=True)
        )
        if counts_examples and all(size == 1 for size in sizes):
            # With one example per replica, a count of calls looks the same.
            known = getattr(variable, _COUNTS, None)
            counts_examples = known is True
            are_equal = known is False or len(values) == 1
        elif counted and all(bool((change != 0).all()) for change in changes):
            setattr(variable, _COUNTS, counts_examples)
        if counts_examples:
            return torch.stack([before, *changes]).sum(0).to(before.dtype)
        # Without known sizes, equal changes above 1 may be equal numbers of examples.
        are_equal = are_equal and (counted or bool(((changes[0] == 0) | (changes[0] == 1)).all()))
    if not are_equal:
        raise StrategyError(
            "the values that the replicas have assigned to integer variable "
            f"{variable.path!r} of a Keras layer cannot be joined; create it with "
            'add_weight(..., aggregation="sum") if the changes add up, or "only_first_replica"'
        )
    return first


@cache
def _scope_class() -> Any:
    """Returns the class of a replica's scope; created on first use, when Keras is imported."""

    class ReplicaScope(library().StatelessScope):  # type: ignore[misc]
        """Records which variables are assigned; Keras's own scope keeps only the values."""

        def __init__(self, written: LayerWrites) -> None:
            super().__init__(collect_losses=True, initialize_variables=False)
            self._written = written

        def add_update(self, update: Any) -> None:
            self._written.write(*update)
            super().add_update(update)

        def get_current_value(self, variable: Any) -> Any:
            return self._written.read(variable, super().get_current_value(variable))

    return ReplicaScope
