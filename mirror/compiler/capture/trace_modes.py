"""Torch modes that see each operation of a traced step; they refuse what a trace would freeze.

A trace has no values. A branch of Python on a value, or a number taken from a tensor, would be
that of the trace forever. So an operation that asks a tensor for its value raises CompileError
with the line. Random numbers come from seeds that are inputs: ``functional_rng.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mirror.base.torch_private import PASS, current_autograd_node, wrapping
from mirror.compiler.capture.constant_values import known_value
from mirror.compiler.capture.functional_rng import FunctionalRng
from mirror.compiler.capture.recurrent_layers import RECURRENT, call_layers, call_own_kernels
from mirror.compiler.capture.seeded_attention import ATTENTION, call_attention
from mirror.compiler.capture.traced_numbers import TracedNumbers, has_traced
from mirror.compiler.step_errors import (
    current_line,
    current_place,
    find_asking_layer,
    is_called_by,
)
from mirror.compiler.torch_internals import (
    ITEM,
    UNIQUE,
    DispatchMode,
    call_noting_place,
    constant_of,
    declaring_writes,
    is_fake,
    run_untraced,
    schema_of,
)
from mirror.errors import CompileError

aten = torch.ops.aten

_BY_VALUE = "decides, or keeps a number, by a value that is known only while the step runs"
_BY_SIZE = "makes a tensor whose size depends on values"
_LATER = (
    "return the tensor from the step and read it after the call, use torch.where in place of a "
    "branch, or pass fallback='eager'"
)

_VALIDATED = (
    "a distribution looks whether its arguments are valid: pass validate_args=False to it, or "
    "fallback='eager'"
)
# Files of torch that look at values to check them.
_VALIDATING = tuple(
    os.path.join("distributions", name) for name in ("distribution.py", "constraints.py")
)
_WEIGHT = (
    "context.weight is a tensor in a compiled step: multiply by it as it is, return it, or give "
    "weights with mirror.InputOptions(weight_of=...)"
)

_ASKS_ONE = {ITEM, aten.item.default, aten.is_nonzero.default}
_ASKS = {*_ASKS_ONE, aten.equal.default, aten.allclose.default}
_SIZES = {
    aten.nonzero.default,
    aten.masked_select.default,
    UNIQUE,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
_BATCH_NORMS = {
    *(F.batch_norm, F.instance_norm),
    *(torch.batch_norm, torch.instance_norm, torch.native_batch_norm),
}
_BY_INDEX = {aten.index.Tensor}
# Why the sparse gradient of something is refused, and what to do.
SPARSE = (
    "is sparse, and has another size in every step",
    "use sparse=False, or pass fallback='eager'",
)
_MASKED = "use torch.where, or multiply by the mask, or pass fallback='eager'"
_EAGERLY = "compile a module without recurrent layers, or pass fallback='eager'"
_RAW = {
    Tensor.numpy: "numpy()",
    Tensor.__array__: "numpy.asarray",
    Tensor.tolist: "tolist()",
    Tensor.data_ptr: "data_ptr()",
    Tensor.__dlpack__: "__dlpack__()",
}


def refusal(what: str, why: str, remedy: str = _LATER) -> CompileError:
    """Returns the error for an operation in the line that is being run."""
    return CompileError(f"the step cannot be compiled: {current_line()}: {what} {why}; {remedy}")


class Operations(DispatchMode):
    """Sees the operations below autograd.

    Args:
        weight: the placeholder of the replica's weight.

    Attributes:
        captured: the tensors used that are neither inputs nor made in the step, by ``id``, each
            with the line of its first use.
    """

    def __init__(self, draws: FunctionalRng, weight: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weight = weight
        self.captured: dict[int, tuple[Tensor, str]] = {}
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS and not _is_constant(args[0]):
            if func in _ASKS_ONE and (known := known_value(args[0])) is not None:
                return run_untraced(lambda: func(known))
            if named := find_asking_layer():
                raise refusal(*named)
            name = func.overloadpacket.__name__.strip("_")
            asked = "a number asked of a tensor" if "scalar" in name else f"{name} of a tensor"
            remedy = _VALIDATED if is_called_by(*_VALIDATING) else _LATER
            if args[0] is self._weight:
                remedy = _WEIGHT
            raise refusal(asked, _BY_VALUE, remedy)
        if func in _SIZES:
            raise refusal(f"{func.overloadpacket.__name__.strip('_')}", _BY_SIZE)
        if func in _BY_INDEX and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            if getattr(current_autograd_node(), "_saved_sparse", False):
                raise refusal("the gradient of an embedding with sparse=True", *SPARSE)
            raise refusal("an index that is a mask", _BY_SIZE, _MASKED)
        for tensor in _tensors((*args, *kwargs.values())):
            if not isinstance(tensor, is_fake):
                self._capture(tensor)
        if schema_of(func).is_mutable:
            self._check_written(func, args, kwargs)
        place = current_place()
        if torch.Tag.nondeterministic_seeded in func.tags:
            return call_noting_place(place, self._draws.draw, func, args, kwargs)
        return call_noting_place(place, func, *args, **kwargs)

    def _capture(self, tensor: Tensor) -> None:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise refusal(
                f"a tensor of shape {tuple(tensor.shape)} that requires a gradient",
                "is neither mirrored nor made in the step",
                "make its module in strategy.scope(), or use it under torch.no_grad()",
            )
        if id(tensor) not in self.captured:
            self.captured[id(tensor)] = tensor, current_line()

    def _check_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for i, argument in enumerate(schema_of(func).arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and any(id(t) in self.captured for t in _tensors([value])):
                raise refusal(
                    f"{func.overloadpacket.__name__} of a tensor",
                    "changes what is neither mirrored nor made in the step, once for each replica",
                    "make it a buffer of a mirrored module, or change it after the step",
                )


def _is_constant(value: Any) -> bool:
    return isinstance(value, is_fake) and constant_of(value) is not None


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [entry for entry in value if isinstance(entry, Tensor)]
    return found


class Functions(TorchFunctionMode):
    """Sees torch's functions: replaces parameters by placeholders, and keeps gradients.

    Args:
        placeholders: by ``id`` of a parameter, its placeholder.
        read: returns the gradient of a placeholder.
        write: sets the gradient of a placeholder.
        numbers: the numbers of Python that are inputs.
        keeps_kernels: whether attention and recurrent layers must call the kernels that an
            uncompiled call has, and are refused where a trace would have others.
    """

    def __init__(
        self,
        placeholders: dict[int, Tensor],
        read: Callable[[Tensor], Tensor | None],
        write: Callable[[Tensor, Tensor | None], None],
        numbers: TracedNumbers,
        *,
        keeps_kernels: bool = False,
    ) -> None:
        super().__init__()
        self._placeholders, self._read, self._write = placeholders, read, write
        self._numbers, self._keeps_kernels = numbers, keeps_kernels
        self._leaves = {id(tensor) for tensor in placeholders.values()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _RAW and not _is_constant(args[0]):
            raise refusal(_RAW[func], _BY_VALUE)
        args = tuple(map(self._replace, args))
        kwargs = {name: self._replace(value) for name, value in (kwargs or {}).items()}
        if args and id(args[0]) in self._leaves:
            if func in _GRAD_GET:
                return self._read(args[0])
            if func == _DATA_SET:  # which no graph would show
                with torch.no_grad():
                    args[0].copy_(args[1].detach())
                return None
            if func in _GRAD_SET:
                self._write(args[0], args[1] if len(args) > 1 else None)
                return None
        if func in RECURRENT:
            if not self._keeps_kernels:
                return call_layers(func, args, kwargs)
            found = call_own_kernels(func, args, kwargs)
            if found is None:
                raise refusal(f"{func.__name__}()", "has other kernels in a trace", _EAGERLY)
            return found
        if func in ATTENTION and not self._keeps_kernels:
            return call_attention(func, args, kwargs)
        if func in _BATCH_NORMS and self._keeps_kernels:
            with declaring_writes():
                return func(*args, **kwargs)
        if self._numbers.sources and has_traced((args, kwargs)):
            return self._numbers.call(func, args, kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def intercepting(self, is_traced: Callable[[], bool]) -> Iterator[None]:
        """Within the block, custom functions and backward passes get the placeholders, too.

        ``Function.apply`` calls no mode, and no mode is active while ``backward`` runs. Without
        this, activations computed again would use the parameters: the modules of a single
        replica have these themselves, and no copies.
        """

        def wrap_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
            def apply_replaced(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
                if is_traced():
                    args = tuple(map(self._replace, args))
                    kwargs = {name: self._replace(value) for name, value in kwargs.items()}
                return apply(cls, *args, **kwargs)

            return apply_replaced

        def wrap_pass(run_pass: Callable[..., Any]) -> Callable[..., Any]:
            def run_watched(*args: Any, **kwargs: Any) -> Any:
                with self if is_traced() else nullcontext():
                    return run_pass(*args, **kwargs)

            return run_watched

        has_pass = hasattr(torch.autograd, PASS)
        with (
            wrapping(Function, "apply", wrap_apply),
            wrapping(torch.autograd, PASS, wrap_pass) if has_pass else nullcontext(),
        ):
            yield

    def _replace(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._placeholders.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(self._replace, value))
        return value


_GRAD: Any = Tensor.grad
_GRAD_GET = (_GRAD.__get__,)
_GRAD_SET = (_GRAD.__set__, _GRAD.__delete__)
_DATA: Any = Tensor.data
_DATA_SET = _DATA.__set__
