"""MirroredParameter: the one object that users see; it resolves to a replica's copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirror.execution.current_replica import current
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam
from mirror.replica.params.subclasses import copied_once, set_to


class MirroredParameter(MirroredTensor, nn.Parameter):
    """A parameter that resolves to the current replica's copy. See [Note: Resolution]."""

    _mirrored: ReplicatedParam

    def _resolve(self, func: object = None) -> Tensor:
        return self._copy()

    def _copy(self) -> ReplicaParameter:
        variable = self._mirrored
        replica_id = variable.forward_param()
        return variable.first() if replica_id is None else variable.copies[replica_id]

    def _expose(self, handle: Tensor | None) -> None:
        self._mirrored.expose_storage(handle)

    @property
    def grad(self) -> Tensor | None:
        """The reduced gradient of the current replica; waits for the reduction."""
        variable, replica = self._mirrored, current.replica
        if replica is None or replica.replicas is not variable.replicas:
            return variable.gradients.read(variable, None)
        r, unreduced = replica.replica_id, variable.gradients.unreduced
        # The fast path of ``read``, without a call, when nothing is pending. The compiler must not
        # take it: a trace would assume that nothing is ever pending.
        if (
            unreduced.pending[r]
            or unreduced.unsettled[r]
            or unreduced.deferring
            or unreduced.deferred
            or torch.compiler.is_compiling()
        ):
            return variable.gradients.read(variable, r)
        return variable.targets[r].grad

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
        """Does the same as ``p.data = source``; the source is a tensor."""
        return set_to(self, source, *args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copied_once(self, lambda: self._copy().plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copy().__reduce_ex__(protocol)
