"""Tracing: a step's function, followed once for all replicas, below autograd.

[Note: One trace]
The step is called once more than the user expects, as a replica would call it, on tensors that
have shapes and no values. What happens below autograd, backward passes and optimizer steps too, is
one graph. What mirror itself would do there is left out, and put in between the programs that the
graph is cut into:

    parameters, buffers   a leaf that stands for all copies is put into the Variable's place
    p.grad                the first look at one meets the others: an operation in the graph
    collectives           another one
    optimizer.step()      runs over the leaves, on stand-ins of its state; rates are tensors
    random numbers        [Note: Seeds] in draws.py
    values, branches      refused: [Note: What a trace freezes] in watching.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from mirror.compiler.capture.functional_rng import FunctionalRng
from mirror.compiler.capture.placeholders import Placeholders
from mirror.compiler.capture.trace_modes import Functions, Operations, refusal
from mirror.compiler.capture.traced_gradients import TracedGradients
from mirror.compiler.capture.traced_numbers import TracedNumbers
from mirror.compiler.capture.traced_swap import TracedSwaps
from mirror.compiler.capture.zero_grad import zero_grad_unconditionally
from mirror.compiler.custom_ops import define
from mirror.compiler.state_tensors import StateTensor
from mirror.compiler.step_inputs import InputKind
from mirror.compiler.torch_internals import compiling
from mirror.errors import CompileError
from mirror.execution.replicas import Replicas, Run, current, push_context, save_context
from mirror.replica.collectives.reduce_ops import reduce_op
from mirror.threads.lockstep import NullLockstep


class CollectivePoint:
    """What the replicas do where a trace has them meet.

    Attributes:
        op: how tensors are reduced; ``None``: they are local gradients of ``places``.
        lie: of each place, in which tensor that is brought, from where on, and the shape.
    """

    def __init__(self, op: str | None, places: Sequence[StateTensor] = ()) -> None:
        self.op = op
        self.places = tuple(places)
        self.lie: list[tuple[int, int, tuple[int, ...]]] = []


class TracedRun(Run):
    """The run that a step is traced in: of one replica that stands for all, and meets nobody."""

    __slots__ = ()

    def merge(self, replica_id: int, point: Any) -> Any:
        replica = self.members[replica_id]
        assert replica.tracing is not None
        replica.tracing.refuse(f"{point.operation}, in which the replicas merge,", "")


class Tracer:
    """Follows a step; it is what its replica asks (``Tracing``).

    Args:
        replicas: whose step it is.
        stand_ins: what stands for everything outside of the step.
        meets_alone: whether gradients are met where there is one replica, too.
        numbers: the numbers of Python that are inputs.
        rates: what learning rates are to the step; see ``TracedSwaps``.

    Attributes:
        meetings: where the replicas meet, in the order of the step.
        modules: the modules that the step has called.
        gradients: what it does with them.
        leases: the optimizers it has stepped.
        draws: how often it draws.
        failed_in_optimizer: whether what could not be followed was an optimizer's.
    """

    def __init__(
        self,
        replicas: Replicas,
        stand_ins: Placeholders,
        *,
        meets_alone: bool,
        numbers: TracedNumbers,
        rates: str = "tensors",
    ) -> None:
        define()
        self._replicas = replicas
        self._stand_ins, self._meets_alone = stand_ins, meets_alone
        self.meetings: list[CollectivePoint] = []
        self.modules: dict[int, nn.Module] = {}
        self.numbers = numbers
        self.leases = TracedSwaps(stand_ins, refusal, numbers, rates=rates)
        self._lent_grads: dict[int, Any] = {}  # by id of the optimizer that steps
        self._next_to_steps: dict[int, tuple[RemovableHandle, ...]] = {}  # the hooks that lend
        self.gradients: TracedGradients | None = None
        self.draws = FunctionalRng(stand_ins.only(InputKind.SEED), refusal)
        self.failed_in_optimizer = False

    def trace(self, call: Callable[[], Any]) -> Any:
        """Calls the step; returns what it returns.

        Raises:
            CompileError: it does what no trace can follow.
        """
        leaves = self._stand_ins.make_leaves()
        self.gradients = TracedGradients(leaves, self._stand_ins.entering, self._reduced, refusal)
        functions = Functions(
            self._stand_ins.by_id(),
            self.gradients.read_leaf,
            self.gradients.write_leaf,
            self.numbers,
        )
        run = TracedRun(self._replicas, NullLockstep(), (0,))
        replica = run.members[0]
        replica.tracing = self
        replica.weight = self._stand_ins.only(InputKind.WEIGHT)  # type: ignore[assignment]
        before = save_context()
        with ExitStack() as stack:
            stack.enter_context(self._stand_ins.in_place(self.gradients))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(compiling())
            stack.enter_context(zero_grad_unconditionally(self, self._clear))
            for hook in (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
                register_module_forward_pre_hook(self._note_module),
            ):
                stack.callback(hook.remove)
            stack.callback(self.leases.end)
            stack.callback(self._remove_hooks)
            stack.callback(self._note_stepping)
            stack.enter_context(Operations(self.draws, self._stand_ins.only(InputKind.WEIGHT)))
            stack.enter_context(functions.everywhere(self._is_followed))
            stack.enter_context(functions)
            try:
                push_context(self._replicas.strategy, replica)
                result = call()
                self.gradients.settle()
                self.leases.check()
            finally:
                current.replica, current.strategy, current.below = before
        return result

    # As a replica asks: see Tracing

    def all_reduce(self, op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns what stands for tensors reduced over the replicas; differentiable."""
        op = reduce_op(op)
        exact = op == "mean"
        dtype = torch.get_default_dtype()
        ready = [t.to(dtype) if exact and not _floats(t) else t for t in tensors]
        for tensor in ready:
            if tensor.is_sparse:
                self.refuse("all_reduce of a sparse tensor", "reduce dense ones")
        results: Sequence[Tensor] = _AllReduce.apply(self, op, *ready)  # type: ignore[no-untyped-call]
        return list(results)

    def own_row(self, row: Tensor) -> Tensor:
        """Returns a table of zeros with a row for each replica, of which its own is this."""
        is_own = self._stand_ins.only(InputKind.PLACE).unsqueeze(1)
        return torch.where(is_own, row, torch.zeros_like(row))

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Raises the error for what no trace can follow."""
        raise refusal(
            what,
            "cannot be followed by one trace for all replicas",
            " or ".join(filter(None, (remedy, "pass fallback='eager'"))),
        )

    # What the graph has in place of what mirror does

    def meet(self, meeting: CollectivePoint, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Has the replicas meet here, with contiguous tensors, as communicators want them."""
        number = len(self.meetings)
        self.meetings.append(meeting)
        met: list[Tensor] = torch.ops.mirror.meet([t.contiguous() for t in tensors], number)
        return met

    def weighted_sum(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns, at replica s, the sum over r of ``(w_r / w_s) g_r``."""
        own = self._stand_ins.only(InputKind.WEIGHT)
        if not self._replicas.weighted:
            return self.meet(CollectivePoint("sum"), grads)
        weighed = [grad * own.to(grad.dtype) for grad in grads]
        return [t / own.to(t.dtype) for t in self.meet(CollectivePoint("sum"), weighed)]

    @property
    def count(self) -> Tensor:
        """How many replicas take part."""
        return self._stand_ins.only(InputKind.COUNT)

    def _reduced(self, places: Sequence[StateTensor], local: list[Tensor]) -> list[Tensor]:
        if not self._replicas.mirrors and not self._meets_alone:
            return local
        return self.meet(CollectivePoint(None, places), local)

    def _clear(self, parameters: Iterable[Tensor]) -> bool:
        """Drops gradients; returns whether all are of what the trace has stand-ins for."""
        assert self.gradients is not None
        places = [self._stand_ins.place_of(parameter) for parameter in parameters]
        if any(place is None for place in places):
            return False
        self.gradients.clear([place for place in places if place is not None])
        return True

    def _note_stepping(self) -> None:
        self.failed_in_optimizer = self.leases.is_stepping

    def _is_followed(self) -> bool:
        """Whether this thread follows the step."""
        return current.replica is not None and current.replica.tracing is self

    # What torch tells

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self.gradients is not None
        self.gradients.settle()
        if self.leases.begin(optimizer):
            # The user's hooks have the gradients themselves: these come next to the step.
            first = optimizer.register_step_pre_hook(self._lend_grads)
            last = optimizer.register_step_post_hook(self._take_grads_back)
            hooks: Any = last.hooks_dict_ref()
            hooks.move_to_end(last.id, last=False)
            self._next_to_steps[id(optimizer)] = first, last

    def _lend_grads(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self.gradients is not None
        if id(optimizer) not in self._lent_grads:
            places = map(self._stand_ins.place_of, self.leases.rewritten(optimizer))
            found = [place for place in places if place is not None]
            self._lent_grads[id(optimizer)] = self.gradients.lend_copies(found)

    def _take_grads_back(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self.gradients is not None
        self.gradients.take_copies_back(self._lent_grads.pop(id(optimizer), {}))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._remove_hooks(optimizer)
        self.leases.swap_out(optimizer)

    def _remove_hooks(self, *optimizers: Optimizer) -> None:
        for key in map(id, optimizers) if optimizers else list(self._next_to_steps):
            for handle in self._next_to_steps.pop(key, ()):
                handle.remove()

    def _note_module(self, module: nn.Module, args: Any) -> None:
        self.modules.setdefault(id(module), module)


class _AllReduce(torch.autograd.Function):
    """Tensors reduced over the replicas. See [Note: Gradients of collectives]."""

    @staticmethod
    def forward(ctx: Any, tracer: Tracer, op: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.tracer, ctx.op = tracer, op
        ctx.set_materialize_grads(True)
        return tuple(tracer.meet(CollectivePoint(op), [tensor.detach() for tensor in tensors]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.op not in ("sum", "mean"):
            raise CompileError(
                f"all_reduce({ctx.op!r}) is not differentiable; detach what is reduced"
            )
        summed = ctx.tracer.weighted_sum(grads)
        if ctx.op == "mean":
            summed = [grad / ctx.tracer.count.to(grad.dtype) for grad in summed]
        return (None, None, *summed)


def _floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
