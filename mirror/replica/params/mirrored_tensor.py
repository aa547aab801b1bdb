"""Tensors that stand for the current replica's copy, and how operations find it.

[Note: Resolution]
A mirrored parameter or buffer stays the object it was; its class is swapped for one of the classes
below. Whatever torch function it is passed to, also inside a list, sees the copy of the current
replica instead, and the first replica's (or the combined buffer) in the cross-replica context.
That costs about 3 us a call. Modules do not pay it: their dicts (``modules/dicts.py``) hand out
the copies themselves while a replica runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mirror.base.torch_private import WithoutSubclass, tracing_state

# Functions that act on the mirrored tensor as a whole; the modules that define the tensors add to
# it. Compared with ==, as method wrappers are never identical.
special_functions: dict[Any, Callable[..., Any]] = {}

# The C++ properties; subclasses have properties of their own.
GRAD: Any = Tensor.grad
DATA: Any = Tensor.data
REQUIRES_GRAD: Any = Tensor.requires_grad

# Hand out raw storage, through which a change is not seen by the version counter.
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
    """Base of the tensors that resolve to a copy; never holds values of its own."""

    def _resolve(self, func: object = None) -> Tensor:
        """Returns the tensor that stands for this one in the current context."""
        raise NotImplementedError

    def _hand_out(self, handle: Tensor | None) -> None:
        """Notes that raw storage left through ``handle``: a possible change."""
        raise NotImplementedError

    def _set_data(self, data: Tensor) -> None:
        """``tensor.data = data``."""
        raise NotImplementedError

    @property
    def data(self) -> Tensor:
        """The current copy's data; in the cross-replica context it counts as a change."""
        data = self._resolve().data
        self._hand_out(data)
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        self._set_data(resolve(value))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        special = special_functions.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        if func in _RAW_STORAGE and isinstance(args[0], MirroredTensor):
            args[0]._hand_out(None)
        if tracing_state() is not None:  # the one of its like that compiles
            return _traced(func, args, kwargs or {})
        resolved = [resolve(arg, func) for arg in args]
        named = {key: resolve(arg, func) for key, arg in kwargs.items()} if kwargs else {}
        result = func(*resolved, **named)
        if isinstance(result, Tensor):
            # An in-place operation returns its operand: the mirrored object, not the copy.
            for original, copy in zip(args, resolved, strict=True):
                if copy is result:
                    return original
        if kwargs and "out" in kwargs:
            return _given_out(kwargs["out"], named["out"], result)
        return result


def _given_out(originals: Any, copies: Any, result: Any) -> Any:
    """Returns the mirrored objects that were given as ``out`` for their copies in a result."""
    if result is copies:
        return originals
    if isinstance(result, tuple) and isinstance(copies, (tuple, list)):
        return type(result)(map(_given_out, originals, copies, result))
    return result


def _traced(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls ``func`` on the mirrored tensors themselves, which torch.jit.trace knows by identity.

    They share the storage of what they stand for, but do not require gradients.
    """
    resolve([*args, *kwargs.values()], func)  # brings buffers up to date
    with WithoutSubclass():
        return func(*args, **kwargs)


def resolve(value: Any, func: object = None) -> Any:
    """Replaces mirrored tensors by the current copies, also inside tuples, lists and dicts."""
    if isinstance(value, MirroredTensor):
        return value._resolve(func)
    if type(value) in (list, tuple):
        return type(value)(resolve(item, func) for item in value)
    if type(value) is dict:
        return {key: resolve(item, func) for key, item in value.items()}
    return value


def special(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers what ``functions`` do when an argument is a mirrored tensor."""

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        special_functions.update(dict.fromkeys(functions, implementation))
        return implementation

    return register


def share_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two strided tensors lie in one storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def raw_set_data(tensor: Tensor, data: Tensor) -> None:
    """Sets the data of the mirrored object itself, not of what it stands for."""
    with WithoutSubclass():
        DATA.__set__(tensor, data)
