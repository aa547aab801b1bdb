"""Rejects models and calls that no program on TPUs can contain, before or during a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mirror.base.torch_private import hooks_of
from mirror.errors import StrategyError, short_repr
from mirror.server.recorded_model import Model
from mirror_tpu.torchax_library import Library

WHOLE_STEPS = (
    "TPUStrategy runs whole steps: put forward, backward and step into one function, and that "
    "into strategy.run"
)
_OTHERWISE = "; or use mirror.MirroredStrategy"

# Functions of torch that a trace would ignore, or freeze.
_REFUSED: dict[str, str] = {
    "grad": "torch.autograd.grad in the step; call loss.backward(), and read p.grad after it",
    "register_hook": "a hook on a tensor in the step; change p.grad after loss.backward()",
    "retain_grad": "retain_grad in the step; only parameters have gradients in it",
    "requires_grad_": "requires_grad_ in the step; set it between runs",
    "register_post_accumulate_grad_hook": "a hook on a gradient; change p.grad after backward",
}


def check_model(model: Model) -> None:
    """Raises StrategyError for a model that no program can contain."""
    for module in model.modules:
        kind = type(module).__name__
        if getattr(module, "max_norm", None) is not None:
            raise StrategyError(
                f"{kind}(max_norm=...) changes its weight when it is read, which a compiled "
                f"program does not; leave max_norm out{_OTHERWISE}"
            )
        if getattr(module, "sparse", False) is True:
            raise StrategyError(
                f"{kind}(sparse=True) has sparse gradients, which jax does not; leave sparse "
                f"out{_OTHERWISE}"
            )
        if hooks_of(module) or vars(module).get("_backward_pre_hooks"):
            raise StrategyError(
                f"a {kind} has a backward hook, which torch's autograd calls and jax's does not; "
                f"remove it{_OTHERWISE}"
            )
    for variable, tensor in zip(model.variables, model.tensors, strict=True):
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.device.type != "cpu":
            raise StrategyError(
                f"TPUStrategy has copies of ordinary tensors on the host; {variable.name} is "
                f"{short_repr(tensor)} of type {type(tensor).__name__} on {tensor.device}; make "
                "the model on the CPU, in this strategy's scope alone"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise StrategyError(
                f"TPUStrategy has copies of dense tensors; {variable.name} has the layout "
                f"{tensor.layout}{_OTHERWISE}"
            )


def check_function(func: Any, args: Any, kwargs: Any) -> None:
    """Raises StrategyError for a function of torch that the step must not call."""
    name = getattr(func, "__name__", "")
    if name in _REFUSED and "torch" in (getattr(func, "__module__", None) or "torch"):
        raise StrategyError(f"no program on TPUs can have {_REFUSED[name]}{_OTHERWISE}")
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise StrategyError(
            "torch.autocast has no effect in a step that is compiled for TPUs; convert the model, "
            f"model.to(torch.bfloat16){_OTHERWISE}"
        )
    if func is F.instance_norm:
        stats = args[1] if len(args) > 1 else kwargs.get("running_mean")
        uses = args[5] if len(args) > 5 else kwargs.get("use_input_stats", True)
        if stats is not None and uses:
            raise StrategyError(
                "running statistics of instance normalization would silently not change in a "
                "program on TPUs; use track_running_stats=False, GroupNorm or LayerNorm"
            )


def refuse_backward(args: Any, kwargs: Any) -> None:
    """Raises StrategyError for ``backward`` with arguments, or of more than one number."""
    loss, *others = args
    asked = [value for value in (*others, *kwargs.values()) if value is not None and value]
    if asked:
        raise StrategyError(
            "backward in a step for TPUs takes no arguments: it is one pass of one loss; call "
            "loss.backward()"
        )
    if loss.numel() != 1:
        raise StrategyError(
            f"backward needs a loss of one element; got {short_repr(loss)}; take its mean or sum"
        )


@contextmanager
def refuse_custom_functions() -> Iterator[None]:
    """Makes custom autograd functions of this thread raise: jax would not call their backward."""
    cls: Any = torch.autograd.Function
    thread = get_ident()
    before = cls.__dict__["apply"]
    apply: Callable[..., Any] = cls.apply.__func__

    def refuse_apply(own: type, *args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:
            return apply(own, *args, **kwargs)
        _refuse_function(own)

    cls.apply = classmethod(refuse_apply)
    try:
        yield
    finally:
        cls.apply = before


def _refuse_function(own: type) -> NoReturn:
    raise StrategyError(
        f"{own.__name__} is a torch.autograd.Function: jax would differentiate its forward and "
        f"never call its backward; write it with functions of torch{_OTHERWISE}"
    )


_OUTSIDE = (
    "which would be a constant of the program; pass it to run as an argument, register it as a "
    "buffer, or create its module in strategy.scope(), or pass that to strategy.mirror"
)


class TorchFunctionWatch(TorchFunctionMode):
    """Rejects functions that no program can contain, and adds behaviour that torchax lacks.

    Args:
        backward: replaces ``loss.backward``, with its arguments.
        parameters: tensors with gradients that must not be stopped.
    """

    def __init__(
        self, library: Library, backward: Callable[[Any, Any], None], parameters: Sequence[Any]
    ) -> None:
        super().__init__()
        self._library, self._backward, self._parameters = library, backward, parameters

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return self._backward(args, kwargs)
        check_function(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except AssertionError as error:
            if "mixed math" not in str(error):
                raise
            raise StrategyError(
                f"the step mixes its tensors with one from outside, {_OUTSIDE}"
            ) from error
        if func is F.batch_norm:
            _update_statistics(args, kwargs)
        self._check_outside(args, kwargs, result)
        self._stop(func, args, result)
        return result

    def _stop(self, func: Any, args: Any, result: Any) -> None:
        """Stops gradients of results that were computed with gradients disabled."""
        if torch.is_grad_enabled():
            return
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        for leaf in _leaves(result):
            # A function that returns its argument (contiguous, to) keeps the argument's graph.
            is_new = in_place or all(leaf is not value for value in args)
            is_free = all(leaf is not parameter for parameter in self._parameters)
            if isinstance(leaf, self._library.tensor) and is_new and is_free:
                leaf.apply_jax_(self._library.jax.lax.stop_gradient)

    def _check_outside(self, args: Any, kwargs: Any, result: Any) -> None:
        """Raises StrategyError if a tensor from outside the step would become a constant."""
        if not any(isinstance(leaf, self._library.tensor) for leaf in _leaves(result)):
            return
        for value in (*args, *kwargs.values()):
            for leaf in _leaves(value):
                if type(leaf) in (Tensor, nn.Parameter, nn.Buffer):
                    raise StrategyError(
                        f"the step uses a tensor of shape {tuple(leaf.shape)} from outside, "
                        f"{_OUTSIDE}"
                    )


def _update_statistics(args: Any, kwargs: Any) -> None:
    """Updates running statistics, since torchax's batch normalization does not."""
    names = "input running_mean running_var weight bias training momentum eps".split()
    given = dict(zip(names, args, strict=False)) | kwargs
    mean, variance = given["running_mean"], given["running_var"]
    if not given.get("training") or mean is None:
        return
    x, momentum = given["input"].detach(), given.get("momentum", 0.1)
    over = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    with torch.no_grad():
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        found = wide.var(over, correction=0) * (count / (count - 1))
        mean.copy_((1 - momentum) * mean + momentum * wide.mean(over).to(mean.dtype))
        variance.copy_((1 - momentum) * variance + momentum * found.to(variance.dtype))


def _leaves(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
