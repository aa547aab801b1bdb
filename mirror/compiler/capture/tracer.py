"""Tracing: one call of a step's function stands for all replicas, below autograd.

[Note: One trace]
The step is called once more than the user expects, on tensors that have shapes and no values. The
operations below autograd, including backward passes and optimizer steps, are one graph. The
graph has no code of mirror's own; that happens between the programs that it is cut into:

    parameters, buffers   a leaf that stands for all copies takes the place of the parameter
    p.grad                the first read is a collective point: an operation in the graph
    collectives           each is a collective point, too
    optimizer.step()      uses the leaves, and placeholders of its state; rates are tensors. State
                          that is sharded, or on a parameter device: steps between two programs
    random numbers        come from seeds: ``functional_rng.py``
    values, branches      raise CompileError: ``trace_modes.py``
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from mirror.comm.reduce_ops import reduce_op
from mirror.compiler.capture.functional_rng import FunctionalRng, NativeDraws
from mirror.compiler.capture.placeholders import Placeholders
from mirror.compiler.capture.recurrent_layers import keeping_weights
from mirror.compiler.capture.trace_modes import Functions, Operations, refusal
from mirror.compiler.capture.traced_gradients import TracedGradients, zero_grad_unconditionally
from mirror.compiler.capture.traced_numbers import TracedNumbers
from mirror.compiler.capture.traced_swap import TracedSwaps
from mirror.compiler.custom_ops import define_ops
from mirror.compiler.step_errors import RunsUncompiled, StateMissing
from mirror.compiler.step_inputs import InputKind, StateTensor
from mirror.compiler.torch_internals import compiling, hiding_fakes
from mirror.errors import CompileError
from mirror.execution.replicas import Replicas
from mirror.execution.run import Run, current, push_context, save_context
from mirror.threads.merge_point import NullLockstep


class UpdatePoint(NamedTuple):
    """An optimizer's step between two programs, over the parameters that are ``places`` there.

    The tensors of its collective point are the parameters' values, then the gradients that there
    are, then, if ``may_skip``, whether the step changes nothing. It returns new values of each.
    """

    optimizer: Optimizer
    have_grads: tuple[bool, ...]
    may_skip: bool


class CollectivePoint:
    """A collective point of a trace: what the replicas reduce there.

    Attributes:
        op: the reduction of the tensors; ``None``: they are local gradients of ``places``.
        packing: for each place, the number of its tensor, its offset in it, and its shape.
        is_weighed: whether the graph multiplies local gradients by their shares.
        update: the step of an optimizer that is made there, with ``op`` "update".
    """

    def __init__(
        self,
        op: str | None,
        places: Sequence[StateTensor] = (),
        *,
        is_weighed: bool = False,
        update: UpdatePoint | None = None,
    ) -> None:
        self.update = update
        self.op, self.is_weighed = op, is_weighed
        self.places = tuple(places)
        self.packing: list[tuple[int, int, tuple[int, ...]]] = []


class TracedRun(Run):
    """The run of a traced step: one replica stands for all, and none of them merges."""

    __slots__ = ()

    def merge(self, replica_id: int, point: Any) -> Any:
        replica = self.members[replica_id]
        assert replica.tracing is not None
        replica.tracing.refuse(f"{point.operation}, in which the replicas merge,", "")


class Tracer:
    """Traces a step; implements ``Tracing`` for the code of mirror that the step calls.

    Args:
        replicas: the replicas that run the step.
        placeholders: the placeholders of everything outside of the step.
        reduces_alone: whether gradients have a collective point even with one replica.
        numbers: the numbers of Python that are inputs.
        rates: the form of learning rates in the step; see ``TracedSwaps``.
        is_of_module: whether it traces the call of a module, which replaces an uncompiled call
            between other code: hooks of parameters are called, and numbers are drawn, as there.

    Attributes:
        collectives: the collective points, in the order of the step.
        modules: the modules that the step has called.
        gradients: the gradients of the parameters.
        swaps: the optimizers that the step has stepped.
        draws: the random numbers that it draws.
        failed_in_optimizer: whether an optimizer's step could not be traced.
        weight: the replica's weight, if the step sets it.
        scalers: the gradient scalers that it uses.
        captured: see ``Operations``.
        placeholders: of everything outside of the step.
    """

    def __init__(
        self,
        replicas: Replicas,
        placeholders: Placeholders,
        *,
        reduces_alone: bool,
        numbers: TracedNumbers,
        rates: str = "tensors",
        is_of_module: bool = False,
    ) -> None:
        define_ops()
        self._replicas = replicas
        self.placeholders, self._reduces_alone = placeholders, reduces_alone
        self.collectives: list[CollectivePoint] = []
        self.modules: dict[int, nn.Module] = {}
        self.numbers = numbers
        self.swaps = TracedSwaps(placeholders, refusal, numbers, rates=rates)
        self._swapped_grads: dict[int, Any] = {}  # by id of the optimizer that steps
        self._next_to_steps: dict[int, tuple[RemovableHandle, ...]] = {}  # the hooks that swap
        self.gradients: TracedGradients | None = None
        seed = placeholders.get_only(InputKind.SEED)
        self.draws = NativeDraws(refusal) if is_of_module else FunctionalRng(seed, refusal)
        self.is_of_module = is_of_module
        self.failed_in_optimizer = False
        self.weight: Tensor | None = None
        self._share: Tensor | None = None
        self.scalers: list[Any] = []
        self.captured: dict[int, tuple[Tensor, str]] = {}
        self._skips: dict[int, Tensor] = {}  # by id of the optimizer
        self._before: dict[int, list[Any]] = {}

    def trace(self, call: Callable[[], Any]) -> Any:
        """Calls the step; returns what it returns.

        Raises:
            CompileError: it cannot be traced.
        """
        leaves = self.placeholders.make_leaves()
        self.gradients = TracedGradients(
            leaves,
            self.placeholders.add_entering,
            self._reduce,
            refusal,
            takes_hooks=not self.is_of_module,
        )
        self._by_id = self.placeholders.index_by_id()
        functions = Functions(
            self._by_id,
            self.gradients.read_leaf,
            self.gradients.write_leaf,
            self.numbers,
            keeps_kernels=self.is_of_module,
        )
        replica = self._replica = TracedRun(self._replicas, NullLockstep(), (0,)).members[0]
        replica.tracing = self
        replica.weight = self.placeholders.get_only(InputKind.WEIGHT)  # type: ignore[assignment]
        before = save_context()
        with ExitStack() as stack:
            stack.callback(self.gradients.remove_hooks)
            stack.enter_context(self.placeholders.substituting(self.gradients))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            # Code of a module that asks whether it is traced goes the way of an uncompiled call.
            stack.enter_context(hiding_fakes() if self.is_of_module else compiling())
            stack.enter_context(zero_grad_unconditionally(self.is_followed, self._clear))
            for register, hook in (
                (register_optimizer_step_pre_hook, self._before_step),
                (register_optimizer_step_post_hook, self._after_step),
                (register_module_forward_pre_hook, self._note_module),
            ):
                stack.callback(register(self._in_trace(hook)).remove)
            stack.callback(self.swaps.end)
            stack.callback(self._remove_hooks)
            stack.callback(self._note_stepping)
            weight = self.placeholders.get_only(InputKind.WEIGHT)
            self.captured = stack.enter_context(Operations(self.draws, weight)).captured
            stack.enter_context(functions.intercepting(self.is_followed))
            stack.enter_context(self.draws.following_states(self.is_followed))
            stack.enter_context(keeping_weights(self.is_followed))
            stack.enter_context(functions)
            try:
                push_context(self._replicas.strategy, replica)
                result = call()
                self.gradients.settle()
                self.swaps.check()
                if False in [scaler.end_trace() for scaler in self.scalers]:
                    raise CompileError(
                        "the step cannot be compiled: it calls step() or unscale_() of a "
                        "GradScaler, and not update(); call scaler.update() at the end of the "
                        "step, or pass fallback='eager'"
                    )
            finally:
                for scaler in self.scalers:
                    scaler.end_trace()
                current.replica, current.strategy, current.below = before
        return result

    # The interface of Tracing

    def all_reduce(self, op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns placeholders of tensors reduced over the replicas; differentiable."""
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
        """Returns a table of zeros with one row per replica, in which ``row`` is its own."""
        is_own = self.placeholders.get_only(InputKind.REPLICA_INDEX).unsqueeze(1)
        return torch.where(is_own, row, torch.zeros_like(row))

    def set_weight(self, value: Any) -> None:
        """Sets the replica's weight, for later backward passes; see ``ReplicaContext.weight``."""
        assert self.gradients is not None
        self.gradients.settle()  # gradients of earlier passes keep their weight
        dtype, device = torch.float64, self.placeholders.device
        with torch.no_grad():
            if isinstance(value, Tensor):
                own = value.detach().reshape(()).to(device=device, dtype=dtype)
            else:
                own = torch.scalar_tensor(value, device=device, dtype=dtype)
            if self._replicas.weighted and self._replicas.mirrors:
                (total,) = self.add_collective(CollectivePoint("sum"), [own])
                # As ``shares_of`` has it: without any weight all replicas count the same.
                self._share = torch.where(total == 0, 1 / self.count, own / total)
        self.weight = self._replica.weight = own  # type: ignore[assignment]

    def use_scaler(self, scaler: Any, tensors: Sequence[Tensor | None]) -> None:
        """Makes tensors of a gradient scaler inputs, which the step may write.

        Raises:
            StateMissing: the scaler has not made them yet.
        """
        if any(scaler is known for known in self.scalers):
            return
        for tensor in tensors:
            if tensor is None:
                raise StateMissing
            self._by_id[id(tensor)] = self.placeholders.add_found(tensor)
        self.scalers.append(scaler)

    def update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Adds a point where the optimizer steps uncompiled, with the gradients of now."""
        assert self.gradients is not None
        if any(value is not None for value in (*args, *kwargs.values())):
            self.refuse("optimizer.step with a closure", "compute the loss before the step")
        known = [p.update.optimizer for p in self.collectives if p.update is not None]
        if any(optimizer is one for one in known):
            self.refuse("a second step of one optimizer", "step it once")
        self.gradients.settle()
        places = self.swaps.places_of(optimizer)
        leaves = [self.placeholders.placeholder_of(place) for place in places]
        grads = [self.gradients.read_leaf(leaf) for leaf in leaves]
        skipped = self._skips.pop(id(optimizer), None)
        point = UpdatePoint(
            optimizer, tuple(grad is not None for grad in grads), skipped is not None
        )
        tensors = [*leaves, *(t for t in (*grads, skipped) if t is not None)]
        number = len(self.collectives)
        self.collectives.append(CollectivePoint("update", places, update=point))
        with torch.no_grad():
            values = torch.ops.mirror.update(tensors, number)
            for leaf, value in zip(leaves, values, strict=False):
                leaf.copy_(value)

    def skip_step_if(self, skipped: Tensor, optimizer: Optimizer) -> None:
        """Makes the optimizer's next step change nothing where ``skipped`` is true."""
        self._skips[id(optimizer)] = skipped

    def run_uncompiled(self) -> NoReturn:
        """Has calls with these sizes run uncompiled: a value must be checked."""
        raise RunsUncompiled

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Raises the error for code that cannot be traced."""
        raise refusal(
            what,
            "cannot be followed by one trace for all replicas",
            " or ".join(filter(None, (remedy, "pass fallback='eager'"))),
        )

    # Operations in place of mirror's own

    def add_collective(
        self, collective: CollectivePoint, tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Adds a collective point; communicators take contiguous tensors."""
        number = len(self.collectives)
        self.collectives.append(collective)
        met: list[Tensor] = torch.ops.mirror.collective([t.contiguous() for t in tensors], number)
        return met

    def weighted_sum(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns, at replica s, the sum over r of ``(w_r / w_s) g_r``."""
        if not self._replicas.weighted:
            return self.add_collective(CollectivePoint("sum"), grads)
        own: Any = self._replica.weight
        weighed = [grad * own.to(grad.dtype) for grad in grads]
        return [t / own.to(t.dtype) for t in self.add_collective(CollectivePoint("sum"), weighed)]

    @property
    def count(self) -> Tensor:
        """The number of replicas that take part, a 0-d tensor in double precision."""
        return self.placeholders.get_only(InputKind.COUNT)

    def _reduce(self, places: Sequence[StateTensor], local: list[Tensor]) -> list[Tensor]:
        if not self._replicas.mirrors and not self._reduces_alone:
            return local
        if self._share is None:
            return self.add_collective(CollectivePoint(None, places), local)
        share = self._share
        zero = torch.zeros_like(share)  # what counts nothing may be NaN
        weighed = [
            torch.where(share == 0, zero.to(grad.dtype), grad * share.to(grad.dtype))
            for grad in local
        ]
        return self.add_collective(CollectivePoint(None, places, is_weighed=True), weighed)

    def _clear(self, parameters: Iterable[Tensor]) -> bool:
        """Drops gradients; returns whether the trace has placeholders for all parameters."""
        assert self.gradients is not None
        places = [self.placeholders.place_of(parameter) for parameter in parameters]
        if any(place is None for place in places):
            return False
        self.gradients.clear([place for place in places if place is not None])
        return True

    def _note_stepping(self) -> None:
        self.failed_in_optimizer = self.swaps.is_stepping

    def is_followed(self) -> bool:
        """Whether this thread traces the step."""
        return current.replica is not None and current.replica.tracing is self

    # Hooks of torch

    def _in_trace(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Returns a hook that other threads, which may train meanwhile, do not run."""

        def call(*args: Any) -> None:
            if self.is_followed():
                hook(*args)

        return call

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self.gradients is not None
        self.gradients.settle()
        if self.swaps.swap_in(optimizer):
            # The user's hooks have the gradients themselves: these come next to the step.
            first = optimizer.register_step_pre_hook(self._swap_in_copies)
            last = optimizer.register_step_post_hook(self._swap_out_copies)
            hooks: Any = last.hooks_dict_ref()
            hooks.move_to_end(last.id, last=False)
            self._next_to_steps[id(optimizer)] = first, last
            if id(optimizer) in self._skips:
                self._before[id(optimizer)] = self.swaps.snapshot(optimizer)

    def _swap_in_copies(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self.gradients is not None
        if id(optimizer) not in self._swapped_grads:
            places = map(self.placeholders.place_of, self.swaps.rewritten(optimizer))
            found = [place for place in places if place is not None]
            self._swapped_grads[id(optimizer)] = self.gradients.swap_in_copies(found)

    def _swap_out_copies(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self.gradients is not None
        self.gradients.swap_out_copies(self._swapped_grads.pop(id(optimizer), {}))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._remove_hooks(optimizer)
        before = self._before.pop(id(optimizer), None)
        if before is not None:
            self.swaps.keep_where(optimizer, self._skips.pop(id(optimizer)), before)
        self.swaps.swap_out(optimizer)

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
        return tuple(
            tracer.add_collective(CollectivePoint(op), [tensor.detach() for tensor in tensors])
        )

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
