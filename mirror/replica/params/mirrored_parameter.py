"""MirroredParameter: the object that stands for the current replica's copy of a parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirror.execution.current_replica import current
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam
from mirror.replica.params.subclasses import copied_once, set_to


class MirroredParameter(MirroredTensor, nn.Parameter):
    """A parameter that stands for the current replica's copy. See [Note: Resolution]."""

    _mirrored: ReplicatedParam

    def _resolve(self, func: object = None) -> Tensor:
        return self._copy()

    def _copy(self) -> ReplicaParameter:
        variable = self._mirrored
        here = variable.forward_param()
        return variable.first() if here is None else variable.copies[here]

    def _hand_out(self, handle: Tensor | None) -> None:
        self._mirrored.expose_storage(handle)

    @property
    def grad(self) -> Tensor | None:
        """The reduced gradient of the current replica; waits for the reduction."""
        variable, replica = self._mirrored, current.replica
        if replica is None or replica.replicas is not variable.replicas:
            return variable.gradients.read(variable, None)
        here, unreduced = replica.replica_id, variable.gradients.unreduced
        # What read does where nothing is to be waited for, as in every zero_grad. The compiler
        # must not follow this: it would take what is pending now for what always is.
        if (
            unreduced.pending[here]
            or unreduced.unsettled[here]
            or unreduced.deferring
            or unreduced.deferred
            or torch.compiler.is_compiling()
        ):
            return variable.gradients.read(variable, here)
        return variable.targets[here].grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._mirrored.gradients.write(self._mirrored, value)

    @grad.deleter
    def grad(self) -> None:
        self._mirrored.gradients.write(self._mirrored, None)

    def _set_data(self, data: Tensor) -> None:
        self._mirrored.set_data(data)

    @property
    def requires_grad(self) -> bool:
        """Whether the current copy requires a gradient."""
        return self._copy().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._mirrored.set_requires_grad(value)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``p.data = source``."""
        return set_to(self, source, *args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copied_once(self, lambda: self._copy().plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copy().__reduce_ex__(protocol)
