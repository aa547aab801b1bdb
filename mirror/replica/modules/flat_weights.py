"""Recurrent layers: the lists of their weights that torch keeps, and the buffer of cuDNN.

[Note: Flat weights]
Problem: an ``nn.RNNBase`` calls its kernel with a list of its weights, ``_flat_weights``. It makes
the list again whenever an attribute is another object than the list's, and then, on a GPU, calls
``flatten_parameters``: cuDNN moves the weights into one buffer. It does so in C++, by setting the
data of each tensor that it gets. Replicas have copies of the weights, but one layer, so one list.
A copy that cuDNN moves leaves its target behind, which optimizers step.
Rule: in ``run`` each replica has lists of its own, which begin with its copies. They change only
if forward computes a weight, as ``weight_norm`` does. ``flatten_parameters`` flattens the current
replica's copies, outside ``run`` all of them, and targets follow their copies. A layer is
flattened when it is mirrored. Weights that are in their buffer stay there, so that a call in
forward moves nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mirror.base.dynamo import disable_dynamo
from mirror.base.torch_private import WEIGHT_LISTS, WEIGHT_REFERENCES, WEIGHTS, wrap_once
from mirror.execution.run import Tracing, current
from mirror.replica.modules.module_owner import interceptor_of, owner_of
from mirror.replica.modules.split_call import CallInterceptor
from mirror.replica.params.mirrored_tensor import resolve_copies
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.replica.params.torch_function import MirroredParameter


def watch_recurrent_layers() -> None:
    """Gives replicas lists of weights of their own, and flattens all copies; permanently."""
    if wrap_once(nn.RNNBase, "flatten_parameters", _wrap_flatten):
        for name in WEIGHT_LISTS:
            setattr(nn.RNNBase, name, _WeightList(name))


_traced: weakref.WeakKeyDictionary[Tracing, dict[int, dict[int, dict[str, list[Any]]]]] = (
    weakref.WeakKeyDictionary()
)


class _WeightList:
    """The descriptor of one of the lists: in ``run`` the replica's own, else the module's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.RNNBase | None, owner: type) -> Any:
        if module is None:
            return self
        if current.replica is not None:
            own = _own_lists(module)
            if own is not None:
                return own[self._name]
        if self._name not in module.__dict__:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        return module.__dict__[self._name]

    def __set__(self, module: nn.RNNBase, value: Any) -> None:
        own = None if current.replica is None else _own_lists(module)
        (module.__dict__ if own is None else own)[self._name] = value

    def __delete__(self, module: nn.RNNBase) -> None:
        del module.__dict__[self._name]


@disable_dynamo
def _own_lists(module: nn.RNNBase) -> dict[str, list[Any]] | None:
    """Returns both lists of the current replica, ``None`` unless the module is one of its own."""
    replica, call = current.replica, interceptor_of(module)
    if replica is None or not isinstance(call, CallInterceptor):
        return None
    if call.replicas is not replica.replicas or not call.replicas.mirrors:
        return None
    # The tensors of a trace are its own, and are gone after it.
    traced = None if replica.tracing is None else _traced.setdefault(replica.tracing, {})
    lists = call.weight_lists if traced is None else traced.setdefault(id(call), {})
    own = lists.get(replica.replica_id)
    if own is None:
        weights = resolve_copies(list(module.__dict__[WEIGHTS]))
        references = [None if weight is None else weakref.ref(weight) for weight in weights]
        own = lists[replica.replica_id] = {WEIGHTS: weights, WEIGHT_REFERENCES: references}
    return own


def _wrap_flatten(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def flatten_parameters(self: Any) -> None:
        owner, replica = owner_of(self), current.replica
        if owner is None or not owner.mirrors:
            original(self)
            return
        weights = getattr(self, WEIGHTS)
        if replica is not None and replica.replicas is owner:
            if replica.tracing is None:  # a trace has no addresses, and calls no cuDNN
                _flatten(original, self, weights)
        elif all(isinstance(weight, MirroredParameter) for weight in weights):
            # Else forward computes some of them, and flattens them itself.
            for row in zip(*(weight._mirrored.leaves for weight in weights), strict=True):
                with_row: Any = object.__new__(type(self))
                with_row.__dict__.update(self.__dict__, **{WEIGHTS: list(row)})
                _flatten(original, with_row, row)

    return flatten_parameters


def _flatten(original: Callable[[Any], None], layer: nn.RNNBase, weights: Sequence[Any]) -> None:
    """Has torch flatten the weights in a layer's list, if it can, unless they are flat already."""
    copies = [weight for weight in weights if isinstance(weight, ReplicaParameter)]
    if len(copies) == len(weights) and all(copy.flat_at == copy.data_ptr() for copy in copies):
        return
    original(layer)
    for copy in copies:
        if copy.variable.follow_leaf(copy):
            copy.flat_at = copy.data_ptr()
