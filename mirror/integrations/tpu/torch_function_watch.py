"""A mode that checks every function of torch that a step calls while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mirror.errors import StrategyError
from mirror.integrations.tpu.torchax_library import Library
from mirror.integrations.tpu.tpu_refusals import check_function

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
        self,
        library: Library,
        backward: Callable[[Any, Any], None],
        parameters: Sequence[Any],
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
