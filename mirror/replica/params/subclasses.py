"""Parameters of classes that others derived from nn.Parameter, and what is set on parameters.

[Note: Kinds of parameters]
Optimizers ask parameters what they are: ``isinstance(p, ManifoldParameter)`` decides how that one
is stepped, ``p.manifold`` along what. So the class that a parameter had stays a base of what it
becomes, and of the replicas' copies; the targets are of that very class; and the attributes that
were set on the parameter before it was mirrored are set on them all. Copies and pickles are what
the class makes of itself. A class whose tensors have operations of their own is refused.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mirror.base.torch_private import make_subclass
from mirror.errors import StrategyError
from mirror.execution.current_replica import current

_Parameter = TypeVar("_Parameter", bound=nn.Parameter)

# What is set on a copy that was made inside run; see mirror/replica/gradients/unmirrored.py.
_OF_RUN = "_copied_in_run"


def refuse_operations(kind: type, name: str) -> None:
    """Raises for a class whose tensors do something of their own in torch's functions."""
    function, dispatch = nn.Parameter.__torch_function__, Tensor.__torch_dispatch__
    if kind.__torch_function__ is function and kind.__torch_dispatch__ is dispatch:  # type: ignore[attr-defined]
        return
    raise StrategyError(
        f"parameter {name!r} is a {kind.__name__}, a tensor subclass with operations of its own; "
        "mirror takes plain parameters: convert it after mirroring, or not at all"
    )


@functools.cache
def derived_class(base: type[_Parameter], kind: type) -> type[_Parameter]:
    """Returns ``base``, for parameters of the class ``kind``."""
    if issubclass(base, kind):
        return base
    made = types.new_class(kind.__name__, (base, kind))
    made.__module__, made.__qualname__ = kind.__module__, kind.__qualname__
    return made


def parameter_like(other: Tensor, kind: type, value: Tensor, requires_grad: bool) -> Any:
    """Returns a parameter of a class, with a value and the attributes of another."""
    made: Any = make_subclass(kind, value.detach(), requires_grad)
    made.__dict__.update(attributes_of(other))
    return made


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """Returns what others have set on a parameter that is not mirrored, or on a target."""
    own = parameter.__dict__
    return {k: v for k, v in own.items() if k not in (_OF_RUN, "variable")} if own else own


def copied_once(
    key: Tensor, plain: Callable[[], nn.Parameter], memo: dict[int, Any]
) -> nn.Parameter:
    """Returns the ordinary copy that ``copy.deepcopy`` makes of a mirrored parameter.

    Args:
        key: what is copied, one of the objects that stand for the parameter.
        plain: gives what that would be if it were not mirrored.
    """
    if id(key) not in memo:
        memo[id(key)] = deepcopy(plain(), memo)
        if current.replica is not None:
            setattr(memo[id(key)], _OF_RUN, True)
    copied: nn.Parameter = memo[id(key)]
    return copied


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


def value_on(value: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of ``value`` in memory of its own, with its strides."""
    return value.detach().to(device, copy=True)


def same_kind(a: Tensor | None, b: Tensor) -> bool:
    """Whether ``b`` can be copied into ``a``."""
    return (
        a is not None
        and a.layout is b.layout is torch.strided
        and a.shape == b.shape
        and a.dtype == b.dtype
    )
