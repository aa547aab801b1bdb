"""What a replica's call of a Keras layer writes, and how the replicas' values become one.

[Note: State of Keras layers]
A Keras layer keeps moving statistics, seeds and counters in variables that its call assigns. On a
replica the outermost call runs in a ``keras.StatelessScope``: what is assigned lands there, not in
the variable. When all replicas have called, each variable is assigned once:

    a seed                          the first replica's; the others draw from seeds of their own
    ``aggregation="sum"``           what it was, and the sum of the changes
    ``"only_first_replica"``        the first replica's
    other floats                    the mean, weighted by examples
    other integers                  that, if all are equal; or it has counted examples: their sum,
                                    which one example for each replica does not tell apart
    a trainable variable            refused: its gradient belongs to the value it had
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.errors import StrategyError
from mirror.replica.collectives.reduce_ops import weighted_mean
from mirror.replica.keras.keras_library import library

_STRIDE = 0x1000003  # Keras adds its counter to the seed: replicas are further apart than it gets
_SEED = "seed_generator_state"
_COUNTS = "_mirror_counts_examples"  # on a variable, once that has been seen


class LayerWrites:
    """What one replica's call has assigned, and the losses it has added.

    Attributes:
        variables: what was assigned, in order, by id.
        losses: what ``add_loss`` and activity regularizers have given.
    """

    def __init__(self, replica_id: int) -> None:
        self.replica_id = replica_id
        self.variables: dict[int, Any] = {}
        self.values: dict[int, Tensor] = {}
        self.losses: list[Tensor] = []
        self._is_reading = False

    def of_layer(self, call: Callable[[], Any]) -> Any:
        """Calls, and notes what is assigned instead of assigning it."""
        scope = _scope_class()(self)
        with scope:
            result = call()
        self.losses = list(scope.losses)
        return result

    def read(self, variable: Any, value: Any) -> Any:
        """Returns what the replica sees of a variable; ``None`` for what it is."""
        if value is not None or self._is_reading or variable.name != _SEED or not self.replica_id:
            return value
        self._is_reading = True
        try:
            seed = variable.value
        finally:
            self._is_reading = False
        return seed + seed.new_tensor([(self.replica_id * _STRIDE) & 0x7FFFFFFF, 0])

    def write(self, variable: Any, value: Tensor) -> None:
        """Notes what the replica has assigned.

        Raises:
            StrategyError: to a trainable variable.
        """
        if variable.trainable:
            raise StrategyError(
                f"the call of a Keras layer assigns trainable variable {variable.path!r}, on "
                "every replica another value; assign it outside the call, in train_step or in a "
                "callback, or make it with trainable=False"
            )
        self.variables[id(variable)] = variable
        self.values[id(variable)] = value.detach()


def assign_joined(
    written: Sequence[LayerWrites],
    sizes: Sequence[float],
    home: torch.device,
    *,
    counted: bool = True,
) -> None:
    """Assigns what the replicas' calls have written, once, in the cross-replica context.

    Args:
        written: by the replicas that have called.
        sizes: how many examples each of them had.
        home: where the variables are.
        counted: whether the sizes are numbers of examples, not just equal.
    """
    variables = {key: v for one in written for key, v in one.variables.items()}
    for key, variable in variables.items():
        before = variable.value.detach()
        values = [one.values.get(key, before).to(home) for one in written]
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
            # Of one example each: a number of calls looks the same.
            known = getattr(variable, _COUNTS, None)
            counts_examples = known is True
            are_equal = known is False or len(values) == 1
        elif counted and all(bool((change != 0).all()) for change in changes):
            setattr(variable, _COUNTS, counts_examples)
        if counts_examples:
            return torch.stack([before, *changes]).sum(0).to(before.dtype)
        # Equal changes may be equal numbers of examples, of which nobody has told.
        are_equal = are_equal and (counted or bool(((changes[0] == 0) | (changes[0] == 1)).all()))
    if not are_equal:
        raise StrategyError(
            f"what the replicas have assigned to integer variable {variable.path!r} of a Keras "
            'layer cannot be joined; make it with add_weight(..., aggregation="sum") if the '
            'changes add up, or "only_first_replica"'
        )
    return first


def _scope_class() -> Any:
    """Returns the scope of a replica's call, a class that Keras must be there for."""
    global _scope
    if _scope is None:
        _scope = _made_scope()
    return _scope


_scope: Any = None


def _made_scope() -> Any:
    class ReplicaScope(library().StatelessScope):  # type: ignore[misc]
        """Notes which variables are assigned, which Keras's own scope does not keep."""

        def __init__(self, written: LayerWrites) -> None:
            super().__init__(collect_losses=True, initialize_variables=False)
            self._written = written

        def add_update(self, update: Any) -> None:
            self._written.write(*update)
            super().add_update(update)

        def get_current_value(self, variable: Any) -> Any:
            return self._written.read(variable, super().get_current_value(variable))

    return ReplicaScope
