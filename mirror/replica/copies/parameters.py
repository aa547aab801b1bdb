"""The parameter classes: one replica's copy, and the object that stands for the current one."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mirror.errors import StrategyError
from mirror.execution.current import current
from mirror.replica.copies.kinds import parameter_like
from mirror.replica.gradients.gradient_hooks import refuse_own_hook, refuse_post_accumulate_hook
from mirror.replica.tensors import DATA, REQUIRES_GRAD, MirroredTensor

if TYPE_CHECKING:
    from mirror.replica.copies.variables import Variable


class ReplicaParameter(nn.Parameter):
    """One replica's copy of a mirrored parameter, as its forward pass sees it."""

    variable: Variable
    replica_id: int

    @property
    def grad(self) -> Tensor | None:
        """The reduced gradient; waits for the reduction."""
        return self.variable.grad_in(self.replica_id)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.variable.set_grad(value)

    @grad.deleter
    def grad(self) -> None:
        self.variable.set_grad(None)

    @property
    def data(self) -> Tensor:
        """The copy's data; setting it moves the target along."""
        data: Tensor = DATA.__get__(self)
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.variable.set_data(value)

    @property
    def requires_grad(self) -> bool:
        """Whether the copy, and its target, require a gradient."""
        required: bool = REQUIRES_GRAD.__get__(self)
        return required

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.variable.set_requires_grad(value)

    def watch(self, arrived: Callable[[Any], object]) -> RemovableHandle:
        """Has ``arrived`` called when autograd has added to the local gradient."""
        register: Callable[..., RemovableHandle] = super().register_post_accumulate_grad_hook
        return register(arrived)

    def register_hook(self, hook: object) -> NoReturn:
        """Refused: it would see the local gradient."""
        refuse_own_hook()

    def register_post_accumulate_grad_hook(self, hook: object) -> NoReturn:
        """Refused: it would run before the gradient is reduced."""
        refuse_post_accumulate_hook()

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``copy.data = source``."""
        return set_to(self, source, *args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> ReplicaParameter:
        """Sets ``requires_grad``."""
        self.variable.set_requires_grad(requires_grad)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _plain_copy(self, self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


class MirroredParameter(MirroredTensor, nn.Parameter):
    """A parameter that stands for the current replica's copy. See [Note: Resolution]."""

    _mirrored: Variable

    def _resolve(self, func: object = None) -> Tensor:
        variable = self._mirrored
        here = variable.here()
        return variable.first() if here is None else variable.copies[here]

    def _hand_out(self, handle: Tensor | None) -> None:
        if self._mirrored.here() is None:
            self._mirrored.hand_out(handle)

    @property
    def grad(self) -> Tensor | None:
        """The reduced gradient of the current replica; waits for the reduction."""
        variable, replica = self._mirrored, current.replica
        if replica is None or replica.group is not variable.group:
            return variable.first_grad()
        here, gradients = replica.replica_id, variable.group.gradients
        # What grad_in does where nothing is to be waited for, as in every zero_grad. The compiler
        # must not follow this: it would take what is pending now for what always is.
        waits = gradients.pending[here] or gradients.unsettled[here]
        waits = waits or gradients.deferring or gradients.deferred
        if waits or torch.compiler.is_compiling():
            return variable.grad_in(here)
        return variable.targets[here].grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._mirrored.set_grad(value)

    @grad.deleter
    def grad(self) -> None:
        self._mirrored.set_grad(None)

    def _set_data(self, data: Tensor) -> None:
        self._mirrored.set_data(data)

    @property
    def requires_grad(self) -> bool:
        """Whether the current copy requires a gradient."""
        return self._resolve().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._mirrored.set_requires_grad(value)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``p.data = source``."""
        return set_to(self, source, *args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._resolve())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _plain_copy(self, self._resolve(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._resolve().__reduce_ex__(protocol)


def set_to(parameter: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """Does what ``parameter.set_(source)`` means; torch passes it to no __torch_function__.

    Raises:
        StrategyError: the source is a bare storage, which belongs to one replica.
    """
    if not isinstance(source, Tensor) or args or kwargs:
        raise StrategyError(
            "set_ of a mirrored parameter takes a tensor, not a storage, which belongs to one "
            "replica; assign p.data, or use p.copy_"
        )
    parameter.data = source
    return parameter


def _plain(copy: Tensor) -> nn.Parameter:
    """Returns what a replica's copy would be if it were not mirrored, on its storage."""
    if not isinstance(copy, ReplicaParameter):
        return nn.Parameter(copy.detach(), copy.requires_grad)
    target = copy.variable.targets[copy.replica_id]
    plain: nn.Parameter = parameter_like(target, type(target), copy, copy.requires_grad)
    return plain


def _plain_copy(key: Tensor, value: Tensor, memo: dict[int, Any]) -> nn.Parameter:
    if id(key) not in memo:
        memo[id(key)] = deepcopy(_plain(value), memo)
        if current.replica is not None:
            memo[id(key)]._copied_in_run = True  # see mirror/replica/gradients/plain.py
    copied: nn.Parameter = memo[id(key)]
    return copied
