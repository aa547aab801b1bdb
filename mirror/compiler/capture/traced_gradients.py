"""The gradients of a traced step: reduced where the step first reads one, cleared unread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mirror.base.torch_private import (
    has_post_accumulate_hooks,
    hooks_of,
    queue_callback,
    wrapping,
)
from mirror.compiler.capture.trace_modes import SPARSE
from mirror.compiler.step_inputs import StateTensor
from mirror.errors import CompileError
from mirror.replica.gradients.ready_grads import DeferredGrads, local_grad, set_local_grad
from mirror.replica.params.replicated_param import apply_hooks

Refusal = Callable[..., CompileError]
Reduce = Callable[[Sequence[StateTensor], list[Tensor]], list[Tensor]]


class TracedGradients:
    """The placeholders of gradients while a step is traced.

    As in a run, local gradients gather until one is read. Then all are reduced at once, and added
    to those that are there. Mirrored parameters use it in place of their ``GradientAccess``.

    Args:
        leaves: the placeholder of each parameter.
        entering: returns the placeholder of the gradient of an earlier step; ``None``: none.
        reduce: returns local gradients reduced over the replicas.
        refusal: creates the error for code that cannot be traced.
        takes_hooks: whether the trace calls the parameters' hooks.

    Attributes:
        left: the gradients of now, of parameters with another gradient than before the step.
        looked_at: the parameters with a gradient of before that the step has read; whether there
            was one.
    """

    def __init__(
        self,
        leaves: dict[StateTensor, Tensor],
        entering: Callable[[StateTensor], Tensor | None],
        reduce: Reduce,
        refusal: Refusal,
        *,
        takes_hooks: bool = True,
    ) -> None:
        self._places = {id(leaf): place for place, leaf in leaves.items()}
        self._records = {id(place.record): place for place in leaves}
        self._leaves, self._entering, self._reduce = leaves, entering, reduce
        self._refusal = refusal
        self.left: dict[StateTensor, Tensor | None] = {}
        self.looked_at: dict[StateTensor, bool] = {}
        self._hooks: list[RemovableHandle] = []
        for place, leaf in leaves.items() if takes_hooks else ():
            self._take_hooks(place, leaf)
        self._is_settling = False  # then torch's functions see the slots themselves

    def _take_hooks(self, place: StateTensor, leaf: Tensor) -> None:
        """Calls a parameter's hooks as any backward pass does; see ``replicated_param.py``."""
        if place.record is not None:
            if place.record.hooks and leaf.requires_grad:
                settle = leaf.register_post_accumulate_grad_hook(
                    lambda _: queue_callback(self.settle)
                )
                self._hooks.append(settle)
            return
        if has_post_accumulate_hooks(place.owner):
            raise self._refusal(
                f"a post-accumulate hook of {place.name!r}",
                "is Python that is called in every backward pass",
                "change gradients between backward and the optimizer's step, or pass "
                "fallback='eager'",
            )
        if leaf.requires_grad:
            for hook in (hooks_of(place.owner) or {}).values():
                self._hooks.append(leaf.register_hook(hook))

    def remove_hooks(self) -> None:
        """Ends the trace: hooks of leaves would keep all of it alive.

        Garbage is not found through an autograd graph that a tensor of the step still has.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # Of leaves, as torch's functions see them

    def read_leaf(self, leaf: Tensor) -> Tensor | None:
        """Returns ``leaf.grad``."""
        if self._is_settling:
            return cast("Tensor | None", local_grad(leaf))
        self.settle()
        return self._get_current(self._places[id(leaf)])

    def write_leaf(self, leaf: Tensor, value: Tensor | None) -> None:
        """Sets ``leaf.grad``."""
        if self._is_settling:
            set_local_grad(leaf, value)
            return
        place = self._places[id(leaf)]
        set_local_grad(leaf, None)
        self.left[place] = value

    def clear(self, places: Sequence[StateTensor]) -> None:
        """Drops the gradients of parameters, without reading them."""
        self._is_settling = True
        try:
            for place in places:
                set_local_grad(self._leaves[place], None)
        finally:
            self._is_settling = False
        self.left.update(dict.fromkeys(places))

    def swap_in_copies(
        self, places: Sequence[StateTensor]
    ) -> dict[StateTensor, tuple[bool, Tensor, Tensor]]:
        """Puts copies in place of gradients, which a step may then write into.

        Returns:
            What ``swap_out_copies`` needs: whether the gradient is one of ``left``, it, its copy.
        """
        swapped = {}
        for place in places:
            grad = self._get_current(place)
            if grad is not None:
                swapped[place] = place in self.left, grad, grad.clone()
        self.left.update({place: copy for place, (_, _, copy) in swapped.items()})
        return swapped

    def swap_out_copies(self, swapped: dict[StateTensor, tuple[bool, Tensor, Tensor]]) -> None:
        """Puts the gradients back, except where the step has set another one."""
        for place, (was_left, grad, copy) in swapped.items():
            if self.left.get(place) is not copy:
                continue
            if was_left:
                self.left[place] = grad
            else:
                del self.left[place]

    def settle(self) -> None:
        """Reduces the local gradients of all backward passes since the last call."""
        self._is_settling = True
        try:
            arrived, local = self._take()
        finally:
            self._is_settling = False
        if arrived:
            with torch.no_grad():
                for place, grad in zip(arrived, self._reduce(arrived, local), strict=True):
                    if place.record is not None:
                        grad = apply_hooks(place.record.hooks, grad)
                    before = self._get_current(place)
                    self.left[place] = grad if before is None else before + grad

    def _take(self) -> tuple[list[StateTensor], list[Tensor]]:
        """Takes the local gradients out of their slots."""
        arrived = [p for p, leaf in self._leaves.items() if local_grad(leaf) is not None]
        local: list[Tensor] = []
        for place in arrived:
            grad = local_grad(self._leaves[place])
            assert grad is not None
            if grad.is_sparse:
                raise self._refusal(f"the gradient of {place.name!r}", *SPARSE)
            local.append(grad.detach())
            set_local_grad(self._leaves[place], None)
        return arrived, local

    def _get_current(self, place: StateTensor) -> Tensor | None:
        if place not in self.left:
            grad = self._entering(place)
            self.looked_at[place] = grad is not None
            return grad
        return self.left[place]

    # As mirrored parameters ask: see GradientAccess

    @property
    def unreduced(self) -> Any:
        """Reports unreduced gradients at any time, so that each read calls ``read``."""
        return _ALWAYS

    def read(self, variable: Any, replica_id: int | None) -> Tensor | None:
        return self.read_leaf(self._leaves[self._records[id(variable)]])

    def write(self, variable: Any, value: Tensor | None) -> None:
        self.write_leaf(self._leaves[self._records[id(variable)]], value)

    def add_hook(self, variable: Any, hook: Any) -> Any:
        raise self._refusal(
            "a hook of a parameter's gradient",
            "is Python that is called in every backward pass",
            "change gradients between backward and the optimizer's step",
        )

    def track(self, copy: Any) -> None: ...

    def receive(self, variable: Any, parameter: Tensor) -> None: ...

    def record_replacement(self, variable: Any, known: Tensor, grad: Tensor) -> None: ...

    def forget(self, variable: Any) -> None: ...


class _Always:
    """Unreduced gradients at any time."""

    pending = unsettled = ([True],)
    scattered: tuple[object, ...] = ()
    deferred = DeferredGrads()


_ALWAYS = _Always()


@contextmanager
def zero_grad_unconditionally(
    is_traced: Callable[[], bool], clear: Callable[[Iterable[Tensor]], bool]
) -> Iterator[None]:
    """Makes ``zero_grad`` of optimizers and modules clear gradients unread, in a traced step.

    Torch's own reads whether each gradient is there. A trace would take that for granted, and
    every call would have to check it, for gradients that are dropped anyway.

    Args:
        is_traced: whether this thread traces the step.
        clear: drops the gradients of parameters; returns whether it could.
    """

    def wrap(zero_grad: Callable[..., None]) -> Callable[..., None]:
        def zero_unread(self: Any, set_to_none: bool = True) -> None:
            held = (
                self.parameters()
                if isinstance(self, nn.Module)
                else (p for group in self.param_groups for p in group["params"])
            )
            if not (set_to_none and is_traced() and clear(held)):
                zero_grad(self, set_to_none)

        return zero_unread

    with wrapping(Optimizer, "zero_grad", wrap), wrapping(nn.Module, "zero_grad", wrap):
        yield
