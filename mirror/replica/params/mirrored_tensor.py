"""MirroredTensor: a tensor that represents the current replica's copy in every operation.

[Note: Resolution]
A mirrored parameter or buffer stays the same object; its class is replaced by a subclass of
``MirroredTensor``. A torch function that gets it as an argument, also inside a list, computes with
the copy of the current replica instead; in the cross-replica context with the first replica's
copy, or with the combined buffer. That costs about 3 us per call. Modules avoid the cost: their
dicts (``modules/module_owner.py``) return the copies themselves while a replica runs.

Optimizers inspect the class and the attributes of parameters: ``isinstance(p, ManifoldParameter)``
decides how a parameter is stepped, and ``p.manifold`` along which manifold. So the class that a
parameter had remains a base class of the mirrored parameter and of the replicas' copies; the
targets have exactly that class. Attributes that were set before mirroring are set on all of them.
Deep copies and pickles are made by that class. A class that overrides ``__torch_function__`` or
``__torch_dispatch__`` is refused.
"""

from __future__ import annotations

import functools
import gc
import inspect
import types
from collections.abc import Callable, Sequence
from copy import deepcopy
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mirror.base.torch_private import WithoutSubclass, is_jit_tracing
from mirror.errors import StrategyError
from mirror.execution.run import current

# Replacements of functions that act on the variable as a whole; ``torch_function.py`` adds them.
# A dict, which compares with ==, because method wrappers are never identical.
special_functions: dict[Any, Callable[..., Any]] = {}

# The C++ properties, which subclasses override.
GRAD: Any = Tensor.grad
DATA: Any = Tensor.data
REQUIRES_GRAD: Any = Tensor.requires_grad

# These functions expose raw storage; writes to it do not increase the version counter.
_RAW_STORAGE = frozenset(
    {
        Tensor.data_ptr,
        Tensor.untyped_storage,
        Tensor.storage,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.share_memory_,
    }
)


class MirroredTensor(Tensor):
    """Base class of the tensors that resolve to a copy; it has no values of its own."""

    def _resolve(self, func: object = None) -> Tensor:
        """Returns the tensor that ``func`` sees instead of this one in the current context."""
        raise NotImplementedError

    def _expose(self, handle: Tensor | None) -> None:
        """Records that raw storage was exposed through ``handle``, and may be written."""
        raise NotImplementedError

    def _set_data(self, data: Tensor) -> None:
        """Implements ``tensor.data = data``."""
        raise NotImplementedError

    @property
    def data(self) -> Tensor:
        """The current copy's data; in the cross-replica context, a read counts as a change."""
        data = self._resolve().data
        self._expose(data)
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        self._set_data(resolve_copies(value))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        special = special_functions.get(func)
        if special is None and type(func) is FunctionType:  # a tool may have wrapped it
            special = special_functions.get(inspect.unwrap(func))
        if special is not None:
            return special(*args, **(kwargs or {}))
        if func in _RAW_STORAGE and isinstance(args[0], MirroredTensor):
            args[0]._expose(None)
        if is_jit_tracing():  # torch.jit.trace
            return _call_traced(func, args, kwargs or {})
        resolved = [resolve_copies(arg, func) for arg in args]
        named = {key: resolve_copies(arg, func) for key, arg in kwargs.items()} if kwargs else {}
        result = func(*resolved, **named)
        if isinstance(result, Tensor):
            # An in-place operation returns its operand: the mirrored object, not the copy.
            for original, copy in zip(args, resolved, strict=True):
                if copy is result:
                    return original
        if kwargs and "out" in kwargs:
            return _replace_out(kwargs["out"], named["out"], result)
        return result


def _replace_out(originals: Any, copies: Any, result: Any) -> Any:
    """Replaces copies in a result by the mirrored objects that were passed as ``out``."""
    if result is copies:
        return originals
    if isinstance(result, tuple) and isinstance(copies, (tuple, list)):
        return type(result)(map(_replace_out, originals, copies, result))
    return result


def _call_traced(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls ``func`` on the mirrored tensors themselves, as torch.jit.trace compares identities.

    They share the storage of the first replica's copies, but do not require gradients.
    """
    resolve_copies([*args, *kwargs.values()], func)  # brings buffers up to date
    with WithoutSubclass():
        return func(*args, **kwargs)


def resolve_copies(value: Any, func: object = None) -> Any:
    """Replaces mirrored tensors by the current copies, also inside tuples, lists and dicts."""
    if isinstance(value, MirroredTensor):
        return value._resolve(func)
    if type(value) in (list, tuple):
        return type(value)(resolve_copies(item, func) for item in value)
    if type(value) is dict:
        return {key: resolve_copies(item, func) for key, item in value.items()}
    return value


def implements(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the implementation of ``functions`` for arguments that are mirrored tensors."""

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        special_functions.update(dict.fromkeys(functions, implementation))
        return implementation

    return register


def share_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two strided tensors share a storage; other layouts have several, or none."""
    if not a.layout is b.layout is torch.strided:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def raw_set_data(tensor: Tensor, data: Tensor) -> None:
    """Sets the data of the mirrored object itself, not of the copy that it resolves to."""
    with WithoutSubclass():
        DATA.__set__(tensor, data)


def path_of(parameter: Tensor | None, name: str) -> str:
    """Returns the longest path of a parameter, from an outermost live module.

    Modules created in a scope are mirrored one by one, before they are assembled, so the name
    recorded then is often only the last part of the path. This function searches all objects of
    the process, which takes some tenths of a second.

    Args:
        name: returned if the parameter is in no module.
    """
    above: dict[int, list[tuple[nn.Module, str]]] = {}
    holders: list[tuple[nn.Module, str]] = []
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module) or parameter is None:
            continue
        for key, child in _items(module, "_modules"):
            above.setdefault(id(child), []).append((module, key))
        holders += [(module, key) for key, p in _items(module, "_parameters") if p is parameter]
    return max((_climb(*holder, above) for holder in holders), key=len, default=name)


def _items(module: nn.Module, name: str) -> list[tuple[str, object]]:
    values = vars(module).get(name)  # not a dict in a ScriptModule
    return list(dict.items(values)) if isinstance(values, dict) else []


def _climb(module: nn.Module, path: str, above: dict[int, list[tuple[nn.Module, str]]]) -> str:
    seen = {id(module)}
    while above.get(id(module)):
        module, key = above[id(module)][0]
        if id(module) in seen:
            break
        seen.add(id(module))
        path = f"{key}.{path}"
    return path


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


def copy_once(
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
