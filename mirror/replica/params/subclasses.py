"""Subclasses of nn.Parameter, and attributes that are set on parameters.

Optimizers inspect parameters: ``isinstance(p, ManifoldParameter)`` decides how a parameter is
stepped, and ``p.manifold`` along which manifold. So the class that a parameter had remains a base
class of the mirrored parameter and of the replicas' copies; the targets have exactly that class.
Attributes that were set before mirroring are set on all of them. Deep copies and pickles are made
by that class. A class that overrides ``__torch_function__`` or ``__torch_dispatch__`` is refused.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mirror.errors import StrategyError
from mirror.execution.replicas import current

_Parameter = TypeVar("_Parameter", bound=nn.Parameter)

# Set on deep copies that are made inside run; read by mirror/replica/gradients/unmirrored.py.
_OF_RUN = "_copied_in_run"


def refuse_operations(kind: type, name: str) -> None:
    """Raises StrategyError for a class with its own torch_function or torch_dispatch."""
    function, dispatch = nn.Parameter.__torch_function__, Tensor.__torch_dispatch__
    if kind.__torch_function__ is function and kind.__torch_dispatch__ is dispatch:  # type: ignore[attr-defined]
        return
    raise StrategyError(
        f"parameter {name!r} is a {kind.__name__}, a tensor subclass with operations of its own; "
        "mirror takes plain parameters: convert it after mirroring, or not at all"
    )


@functools.cache
def derived_class(base: type[_Parameter], kind: type) -> type[_Parameter]:
    """Returns a class derived from ``base`` and ``kind``; ``base`` if it is derived already."""
    if issubclass(base, kind):
        return base
    derived = types.new_class(kind.__name__, (base, kind))
    derived.__module__, derived.__qualname__ = kind.__module__, kind.__qualname__
    return derived


def parameter_like(other: Tensor, kind: type, value: Tensor, requires_grad: bool) -> Any:
    """Returns a parameter of class ``kind`` on the memory of ``value``.

    It has the attributes of ``other``. The constructor of ``kind`` is not called.
    """
    parameter: Any = nn.Parameter.__new__(kind, value.detach(), requires_grad)
    parameter.__dict__.update(attributes_of(other))
    return parameter


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """Returns the attributes that code outside mirror has set on a parameter or target."""
    own = parameter.__dict__
    return {k: v for k, v in own.items() if k not in (_OF_RUN, "variable")} if own else own


def copied_once(
    key: Tensor, plain: Callable[[], nn.Parameter], memo: dict[int, Any]
) -> nn.Parameter:
    """Returns the ordinary parameter that ``copy.deepcopy`` makes of a mirrored one.

    Args:
        key: the object to copy: the mirrored parameter or a replica's copy.
        plain: returns ``key`` as an ordinary parameter.
    """
    if id(key) not in memo:
        memo[id(key)] = deepcopy(plain(), memo)
        if current.replica is not None:
            setattr(memo[id(key)], _OF_RUN, True)
    copied: nn.Parameter = memo[id(key)]
    return copied


def set_to(parameter: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements ``parameter.set_(source)``, for which torch calls no ``__torch_function__``.

    Raises:
        StrategyError: the source is a storage, which belongs to one replica.
    """
    if not isinstance(source, Tensor) or args or kwargs:
        raise StrategyError(
            "set_ of a mirrored parameter takes a tensor, not a storage, which belongs to one "
            "replica; assign p.data, or use p.copy_"
        )
    parameter.data = source
    return parameter


def value_on(value: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of ``value`` in new memory, with its strides."""
    return value.detach().to(device, copy=True)


def same_kind(a: Tensor | None, b: Tensor) -> bool:
    """Whether ``b`` can be copied into ``a``: both strided, of one shape and dtype."""
    return (
        a is not None
        and a.layout is b.layout is torch.strided
        and a.shape == b.shape
        and a.dtype == b.dtype
    )
