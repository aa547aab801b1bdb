"""Calls the user's step with jax's tensors, traced or abstract.

``jax.jit`` has no autograd tape, but the step keeps its form: forward, ``loss.backward()``, code
on gradients, ``optimizer.step()``. So a program is traced by three calls of the step, with the
same tensors and the same random keys:

    INSPECT         abstract: finds the optimizers that step and the outputs; computes nothing
    DIFFERENTIATE   ends at ``backward`` with the loss, which jax differentiates
    FINISH          the whole step; ``backward`` sets ``p.grad`` to the reduced gradients, with
                    which clipping, the optimizer's step and metrics compute

The second and the third call have the same forward operations on the same values, and XLA
computes them once. Python's side effects happen three times for each shape of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mirror.errors import StrategyError
from mirror.execution.run import Replica, current, push_context, save_context
from mirror.server.recorded_model import Model
from mirror_tpu.optimizers import check, options_of
from mirror_tpu.refusals import (
    TorchFunctionWatch,
    refuse_backward,
    refuse_custom_functions,
)
from mirror_tpu.torchax_library import Library

Phase = Enum("Phase", "INSPECT DIFFERENTIATE FINISH")


class ReachedParams(BaseException):
    """Ends a call of the step at ``loss.backward()``."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class TracedCall:
    """One call of a step with tensors of jax.

    Args:
        phase: which of the three calls this is.
        strategy: the strategy that is current in the step.
        optimizers: all optimizers with parameters of the model.
        values: arrays, one per tensor of the model.
        grads: the gradients that ``backward`` sets in ``FINISH``, by index of the parameter.
        apply: called for an optimizer's step with its index, parameters and gradients by index;
            returns new values by index.

    Attributes:
        stepped: indices of the optimizers that have stepped.
        has_backward: whether ``backward`` was called.
        buffers: the changed buffers at the end, by index.
    """

    def __init__(
        self,
        library: Library,
        phase: Phase,
        strategy: Any,
        model: Model,
        optimizers: Sequence[Optimizer],
        values: Sequence[Any],
        *,
        grads: dict[int, Any] | None = None,
        apply: Callable[[int, dict[int, Any], dict[int, Any]], dict[int, Any]] | None = None,
    ) -> None:
        self._library, self._phase, self._strategy = library, phase, strategy
        self._model, self._optimizers = model, optimizers
        self._grads, self._update = grads or {}, apply
        env = library.env
        with env:
            self.tensors = [env.j2t_iso(value) for value in values]
        self._values = list(values)
        self._position = {id(tensor): i for i, tensor in enumerate(model.tensors)}
        self._number = {id(optimizer): i for i, optimizer in enumerate(optimizers)}
        self._stale: dict[int, Any] = {}
        self.stepped: list[int] = []
        self.has_backward = self._leaves_old = False
        self.buffers: dict[int, Any] = {}

    def __call__(self, key: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the step; returns its result, with jax's tensors.

        Raises:
            StrategyError: the step does something that no program can do.
            ReachedParams: the phase is DIFFERENTIATE, and the step has reached ``backward``.
        """
        errors = self._library.jax.errors
        try:
            with self._tracing(key):
                result = fn(*args, **kwargs)
                self._finish()
                return result
        except (errors.JAXTypeError, errors.JAXIndexError) as error:
            raise StrategyError(
                "the step reads a value (.item(), float(loss), a branch on a tensor, a shape that "
                "depends on data), but tensors have no values while it is traced; return the "
                "tensor from the step, and read it outside run"
            ) from error
        except self._library.not_found as error:
            raise StrategyError(
                f"torchax lacks an operation of the step: {error}; write the step with other "
                "operations, or use mirror.MirroredStrategy"
            ) from error

    @contextmanager
    def _tracing(self, key: Any) -> Iterator[None]:
        library, before = self._library, save_context()
        with ExitStack() as stack:
            stack.enter_context(self._swap_tensors())
            stack.enter_context(refuse_custom_functions())
            for hook in (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                stack.callback(hook.remove)
            stack.enter_context(library.env)
            stack.enter_context(library.env.override_property(prng=key))
            stack.enter_context(torch.device("jax"))
            watching = TorchFunctionWatch(
                library, self.backward, self.tensors[: self._model.num_parameters]
            )
            stack.enter_context(watching)
            try:
                push_context(self._strategy, make_traced_replica(self._strategy))
                self._begin()
                yield
            finally:
                current.replica, current.strategy, current.below = before

    @contextmanager
    def _swap_tensors(self) -> Iterator[None]:
        """Replaces the tensors of modules and optimizers by jax's inside the block."""
        self._tables: list[tuple[Any, str, int, Tensor]] = []
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        held = [group["params"] for group in groups]
        options_before = [options_of(optimizer) for optimizer in self._optimizers]
        options = [dict(group) for group in groups]
        try:
            for module in self._model.modules:
                tables: tuple[Any, ...] = (module._parameters, module._buffers)
                for table in tables:
                    for name, tensor in table.items():
                        i = self._position.get(id(tensor))
                        if i is not None and tensor is not None:
                            self._tables.append((table, name, i, tensor))
            for table, name, i, _ in self._tables:
                table[name] = self.tensors[i]
            for group in groups:
                group["params"] = [self._traced_tensor(p) for p in group["params"]]
            yield
            if options_before != [options_of(optimizer) for optimizer in self._optimizers]:
                for group, before in zip(groups, options, strict=True):
                    group.update(before)
                raise StrategyError(
                    "the step has changed an optimizer's options, which would happen while it is "
                    "traced and never again; change them, and step schedulers, between runs"
                )
        finally:
            for table, name, _, tensor in self._tables:
                table[name] = tensor
            for group, parameters in zip(groups, held, strict=True):
                group["params"] = parameters

    def _traced_tensor(self, parameter: Tensor) -> Any:
        i = self._position.get(id(parameter))
        if i is None:
            raise StrategyError(
                "an optimizer has parameters of the strategy's modules together with others; pass "
                "the module of the others to strategy.mirror(module), or give them a separate "
                "optimizer"
            )
        return self.tensors[i]

    # What the step calls

    def backward(self, args: Any, kwargs: Any) -> None:
        """Replaces ``loss.backward()``."""
        refuse_backward(args, kwargs)
        if not torch.is_grad_enabled():
            raise StrategyError("backward was called with gradients disabled; leave no_grad out")
        if self.has_backward:
            raise StrategyError(
                "a step for TPUs has one backward pass; add the losses up, and call backward of "
                "the sum; for several optimizers with losses of their own write several steps"
            )
        self.has_backward = True
        if self._phase is Phase.DIFFERENTIATE:
            raise ReachedParams(args[0])
        for i, tensor in enumerate(self.tensors[: self._model.num_parameters]):
            grad = self._values[i] if self._phase is Phase.INSPECT else self._grads.get(i)
            if i in self._stale:
                is_old = tensor.grad is self._stale[i]
                self._leaves_old = self._leaves_old or (is_old and i in self._grads)
            tensor.grad = None
            if grad is not None and self._model.tensors[i].requires_grad:
                tensor.grad = self._library.env.j2t_iso(grad)

    def _begin(self) -> None:
        """Sets gradients of parameters to zeros, to detect steps that do not clear them."""
        for i, tensor in enumerate(self.tensors[: self._model.num_parameters]):
            if self._model.tensors[i].requires_grad:
                self._stale[i] = tensor.grad = self._library.env.j2t_iso(
                    self._library.jax.numpy.zeros_like(self._values[i])
                )

    def _finish(self) -> None:
        self._check_cleared()
        for table, name, i, _ in self._tables:
            now, was = table.get(name), self._values[i]
            is_parameter = i < self._model.num_parameters
            if now is self.tensors[i] and now.jax() is was:
                continue
            if is_parameter:
                raise StrategyError(
                    f"the step has written to {self._model.variables[i].name} directly, and the "
                    "values may differ between replicas; let an optimizer write, or write between "
                    "runs"
                )
            if now is None or tuple(now.shape) != tuple(was.shape):
                raise StrategyError(
                    f"the step has given the buffer {self._model.variables[i].name} another "
                    "shape; a program has one shape for it"
                )
            self.buffers[i] = now.jax().astype(was.dtype)

    def _check_cleared(self) -> None:
        held = [t.grad for t in self.tensors[: self._model.num_parameters]]
        if self.has_backward and self._leaves_old and any(g is not None for g in held):
            raise StrategyError(
                "gradients would add up over steps, but a program keeps none of them after a run; "
                "call optimizer.zero_grad() in the step, before backward or at its end, and pass "
                "whole batches instead of accumulating"
            )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._strategy is not current.strategy:
            return  # a step of another thread
        number = self._number.get(id(optimizer))
        if number is None:
            raise StrategyError(
                f"the step calls step() of a {type(optimizer).__name__} that the strategy has not "
                "recorded: create the model in strategy.scope() or pass it to strategy.mirror, "
                "and create the optimizer after the strategy"
            )
        check(optimizer)
        if args[1:] or any(value is not None for value in kwargs.values()):
            raise StrategyError(
                "an optimizer's step with a closure evaluates the model again and again; in a "
                "step for TPUs call loss.backward() and optimizer.step()"
            )
        if number in self.stepped:
            raise StrategyError("an optimizer steps once in a step for TPUs; write two steps")
        self.stepped.append(number)
        ids = {id(tensor): i for i, tensor in enumerate(self.tensors)}
        mine = [ids[id(p)] for group in optimizer.param_groups for p in group["params"]]
        if self._phase is Phase.FINISH and self._update is not None:
            grads = {i: g.jax() for i in mine if (g := self.tensors[i].grad) is not None}
            found = self._update(number, {i: self._values[i] for i in mine}, grads)
            for i, value in found.items():
                self._values[i] = value
                self.tensors[i].apply_jax_(lambda _, value=value: value)
        # torch's own step finds nothing to do.
        self._groups = [(group, group["params"]) for group in optimizer.param_groups]
        for group, _ in self._groups:
            group["params"] = []

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._strategy is current.strategy:
            for group, parameters in self._groups:
                group["params"] = parameters


_WAYS = {
    "all_reduce": "return the values from the step and call strategy.reduce",
    "all_gather": "return the values from the step and call strategy.gather",
    "merge_call": "do it between runs",
    "replica_id_in_sync_group": "one program is all replicas'; choose among the results of run",
    "device": "use the device of a tensor: x.device",
    "weight": "give InputOptions(weight_of=...) to distribute_dataset",
}


class TracedContext:
    """The result of ``mirror.get_replica_context()`` in a step for TPUs."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.num_replicas_in_sync: int = strategy.num_replicas_in_sync

    def __getattr__(self, name: str) -> NoReturn:
        if name in _WAYS:
            raise StrategyError(
                f"a step for TPUs is one program for all replicas, and has no {name}; "
                f"{_WAYS[name]}, or use mirror.MirroredStrategy"
            )
        raise AttributeError(f"'TracedContext' object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _WAYS:
            getattr(self, name)
        super().__setattr__(name, value)


def make_traced_replica(strategy: Any) -> Replica:
    """Returns the ``current.replica`` of a traced step: one replica that represents all."""
    replicas: Any = SimpleNamespace(
        mirrors=False,  # there are no mirrored variables
        is_nested=False,
        strategy=strategy,
        num_replicas=strategy.num_replicas_in_sync,
        devices=strategy.devices,
        timeline=None,
    )
    run: Any = SimpleNamespace(outer=None, has_stepped=False, active=(0,))
    replica = Replica(replicas, run, 0, 1.0)
    replica.context = TracedContext(strategy)
    return replica
