"""Layers and metrics of Keras on replicas: the variables that their calls assign, once for all.

Keras is used only after the program has imported it; only ``mirror.keras`` imports it itself. A
metric inside ``run`` is one object for all replicas, updated once for the whole batch, see
[Note: Metrics] in ``modules/metric_calls.py``; inside the call of a Keras layer its variables are
merged like any other variable.

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

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.base.dynamo import disable_dynamo
from mirror.base.torch_private import wrap_once
from mirror.comm.reduce_ops import weighted_mean
from mirror.errors import StrategyError
from mirror.execution.run import current
from mirror.replica.modules.metric_calls import Join, merge_call_joined
from mirror.values import leaves_of

# The module with Keras's state of a thread (training, dtype, names). It has no public name.
_TRACKER = "keras.src.backend.common.global_state"


def keras_library() -> Any:
    """Returns Keras if it is completely imported and computes with torch, else ``None``."""
    keras = find_keras()
    return keras if keras is not None and keras.config.backend() == "torch" else None


def find_keras() -> Any:
    """Returns Keras with any backend if it is completely imported, else ``None``."""
    keras = sys.modules.get("keras")
    is_whole = hasattr(keras, "StatelessScope") and hasattr(keras, "config")
    return keras if is_whole else None


def is_layer(module: object) -> bool:
    """Returns whether a module is a Keras layer; False without importing Keras."""
    keras = keras_library()
    return keras is not None and isinstance(module, keras.Layer)


def keras_device(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which Keras computes on a device."""
    context: AbstractContextManager[Any] = keras_library().device(str(device))
    return context


def is_stateless() -> bool:
    """Returns whether this thread is in a ``keras.StatelessScope``, which has its own values."""
    return vars(_state_of_thread()).get("stateless_scope") is not None


class KerasThreadState:
    """Keras's state of the calling thread: training, dtype, names, masks.

    Each replica gets a copy, since replicas run in their own threads and change the state.
    """

    def __init__(self) -> None:
        self._held = dict(vars(_state_of_thread()))

    def enter(self) -> dict[str, Any]:
        """Copies the state to this thread; returns the thread's previous state."""
        state = vars(_state_of_thread())
        before = dict(state)
        state.clear()
        # Lists are stacks, which replicas must not share.
        state.update({k: list(v) if type(v) is list else v for k, v in self._held.items()})
        return before

    def restore(self, before: dict[str, Any]) -> None:
        """Restores this thread's previous state."""
        state = vars(_state_of_thread())
        state.clear()
        state.update(before)


def _state_of_thread() -> Any:
    return sys.modules[_TRACKER].GLOBAL_STATE_TRACKER


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

    class ReplicaScope(keras_library().StatelessScope):  # type: ignore[misc]
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


_METHODS = ("update_state", "result", "reset_state")


def wrap_metrics() -> None:
    """Makes replicas' calls of Keras metrics happen once for all replicas. Idempotent."""
    base = keras_library().metrics.Metric
    if not wrap_once(base, "__init__", _wrap_init):
        return
    kinds = [base]
    while kinds:
        kind = kinds.pop()
        kinds += type.__subclasses__(kind)
        _wrap_kind(kind)


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for kind in type(self).__mro__[:-1]:
            if issubclass(
                kind, keras_library().metrics.Metric
            ):  # a class that is newer than the wrap
                _wrap_kind(kind)

    return __init__


def _wrap_kind(kind: type) -> None:
    for name in _METHODS:
        if callable(vars(kind).get(name)):
            wrap_once(kind, name, _call_once_for_all)


def _call_once_for_all(method: Callable[..., Any]) -> Callable[..., Any]:
    @disable_dynamo
    def call(metric: Any, *args: Any, **kwargs: Any) -> Any:
        replica = current.replica
        if replica is None or not replica.replicas.mirrors or is_stateless():
            return method(metric, *args, **kwargs)
        device = replica.replicas.devices[0]

        def call_once(*args: Any, **kwargs: Any) -> Any:
            with keras_device(device):
                return method(metric, *args, **kwargs)

        return merge_call_joined(replica, metric, call_once, args, kwargs, KerasJoin)

    return call


class KerasJoin(Join):
    """Joins the replicas' arguments of a Keras metric; structures of tensors entry by entry."""

    def __call__(self, *parts: Any) -> Any:
        first = parts[0]
        if isinstance(first, np.ndarray) and first.ndim:
            return np.concatenate(parts)
        if isinstance(first, (list, tuple)) and any(
            isinstance(leaf, (Tensor, np.ndarray)) for leaf in leaves_of(first)
        ):
            return type(first)([self(*entries) for entries in zip(*parts, strict=True)])
        return super().__call__(*parts)

    def reduction(self) -> str:
        return "sum" if isinstance(self.metric, keras_library().metrics.Sum) else ""
