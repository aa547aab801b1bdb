"""What tensor functions that act on a variable as a whole do with a mirrored one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.errors import StrategyError
from mirror.replica.tensors import DATA, GRAD, REQUIRES_GRAD, resolve, special
from mirror.replica.variables import MirroredParameter


@special(GRAD.__get__)
def _get_grad(self: Any) -> Tensor | None:
    grad: Tensor | None = self.grad
    return grad


@special(GRAD.__set__)
def _put_grad(self: Any, value: Tensor | None) -> None:
    self.grad = value


@special(GRAD.__delete__)
def _delete_grad(self: Any) -> None:
    self.grad = None


@special(Tensor.detach)
def _detach(self: Any) -> Tensor:
    if isinstance(self, MirroredParameter):
        self._hand_out(None)  # its numpy array may be written without a new version
    detached: Tensor = self._resolve(Tensor.detach).detach()
    return detached


@special(REQUIRES_GRAD.__set__)
def _put_requires_grad(self: Any, value: bool) -> None:
    self.requires_grad = value


@special(Tensor.requires_grad_)
def _requires_grad_(self: Any, requires_grad: bool = True) -> Any:
    self.requires_grad = requires_grad
    return self


@special(Tensor.register_hook)
def _register_hook(self: MirroredParameter, hook: Callable[[Tensor], Tensor | None]) -> Any:
    variable = self._mirrored
    here = variable.here()
    copies: Sequence[Any] = variable.copies if here is None else (variable.copies[here],)
    return _Handles([copy.register_hook(hook) for copy in copies])


class _Handles:
    """Removes a hook from all copies."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


@special(Tensor.register_post_accumulate_grad_hook)
def _register_post_accumulate_grad_hook(self: Any, hook: object) -> None:
    raise StrategyError(
        "a post-accumulate hook would run before this parameter's gradient is reduced over the "
        "replicas; read p.grad after backward(), or use register_hook for the local gradient"
    )


@special(torch.autograd.grad)
def _autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` with respect to mirrored parameters, among others.

    Inside ``run`` the replica's own gradient; in the cross-replica context the sum over the
    copies, which is the whole gradient because the loss is the common one.
    """
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    spread: list[tuple[Tensor, ...]] = [
        p._mirrored.copies
        if isinstance(p, MirroredParameter) and p._mirrored.here() is None
        else (resolve(p),)
        for p in inputs
    ]
    flat = torch.autograd.grad(
        resolve(outputs),
        [copy for copies in spread for copy in copies],
        grad_outputs,
        retain_graph,
        create_graph,
        allow_unused=True,
        **options,
    )
    remaining = iter(flat)
    totals: list[Tensor | None] = []
    for copies in spread:
        parts = [next(remaining) for _ in copies]
        used = [part.to(copies[0].device) for part in parts if part is not None]
        totals.append(sum(used[1:], start=used[0]) if used else None)
        if not used and materialize_grads:
            totals[-1] = torch.zeros_like(copies[0])
        elif not used and not allow_unused:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior."
            )
    return tuple(totals)


@special(DATA.__get__)
def _get_data(self: Any) -> Any:
    return self.data


@special(DATA.__set__)
def _put_data(self: Any, value: Tensor) -> None:
    self.data = value
