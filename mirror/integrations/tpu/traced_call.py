"""A call of the user's step in which tensors are jax's, traced or abstract.

[Note: Three calls]
There is no tape of autograd under ``jax.jit``, and the step shall keep its form: forward,
``loss.backward()``, what is done to gradients, ``optimizer.step()``. So a program is traced by
calling the step three times, each time with the same tensors and the same random keys:

    LOOK            abstractly: which optimizers step, what comes out; nothing is computed
    DIFFERENTIATE   up to ``backward``, where the call is left with the loss: jax differentiates it
    FINISH          all of it; ``backward`` puts reduced gradients into ``p.grad``, and all that
                    follows computes with them: clipping, the optimizer's step, metrics

The forward pass of the second and the third call are the same operations of the same values, which
XLA computes once. Python's side effects happen three times for each shape of a batch, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mirror.errors import StrategyError
from mirror.execution.current_replica import current, push_context, save_context
from mirror.integrations.tpu.torch_function_watch import TorchFunctionWatch
from mirror.integrations.tpu.torchax_library import Library
from mirror.integrations.tpu.tpu_optimizers import check, options_of
from mirror.integrations.tpu.tpu_refusals import refuse_backward, refusing_functions
from mirror.integrations.tpu.traced_context import inside
from mirror.server.recorded_model import Model

Phase = Enum("Phase", "LOOK DIFFERENTIATE FINISH")


class ReachedParams(BaseException):
    """Leaves a call where it says ``loss.backward()``."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class TracedCall:
    """One call of a step with tensors of jax.

    Args:
        phase: see [Note: Three calls].
        strategy: what is current inside.
        optimizers: all that hold parameters of the model.
        values: arrays, one per tensor of the model.
        grads: what ``backward`` finds, by position of the parameter, in ``FINISH``.
        apply: called for an optimizer's step with its number, parameters and gradients by
            position; returns new values by position.

    Attributes:
        stepped: numbers of the optimizers that have stepped.
        has_backward: whether ``backward`` was called.
        buffers: what the buffers are at the end, by position; of those that were changed.
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
        """Calls the step; returns what it does, with tensors of jax.

        Raises:
            StrategyError: the step does what no program can do.
            Reached: it is differentiated, and has reached ``backward``.
        """
        errors = self._library.jax.errors
        try:
            with self._inside(key):
                result = fn(*args, **kwargs)
                self._finish()
                return result
        except (errors.JAXTypeError, errors.JAXIndexError) as error:
            raise StrategyError(
                "the step asks for a value (.item(), float(loss), a branch on a tensor, a shape "
                "that depends on data), which there is none of while it is traced; return the "
                "tensor from the step, and look at it outside of run"
            ) from error
        except self._library.not_found as error:
            raise StrategyError(
                f"torchax does not have an operation of the step: {error}; write it otherwise, "
                "or use mirror.MirroredStrategy"
            ) from error

    @contextmanager
    def _inside(self, key: Any) -> Iterator[None]:
        library, before = self._library, save_context()
        with ExitStack() as stack:
            stack.enter_context(self._swapped())
            stack.enter_context(refusing_functions())
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
                push_context(self._strategy, inside(self._strategy))
                self._begin()
                yield
            finally:
                current.replica, current.strategy, current.below = before

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """Has modules and optimizers hold tensors of jax."""
        self._tables: list[tuple[Any, str, int, Tensor]] = []
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        held = [group["params"] for group in groups]
        said = [options_of(optimizer) for optimizer in self._optimizers]
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
                group["params"] = [self._standing_for(p) for p in group["params"]]
            yield
            if said != [options_of(optimizer) for optimizer in self._optimizers]:
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

    def _standing_for(self, parameter: Tensor) -> Any:
        i = self._position.get(id(parameter))
        if i is None:
            raise StrategyError(
                "an optimizer holds parameters of the strategy's modules and others, which no "
                "module made in its scope has; give those to strategy.mirror(module), or to an "
                "optimizer of their own"
            )
        return self.tensors[i]

    # What the step calls

    def backward(self, args: Any, kwargs: Any) -> None:
        """Stands for ``loss.backward()``."""
        refuse_backward(args, kwargs)
        if not torch.is_grad_enabled():
            raise StrategyError("backward was called where gradients are off; leave no_grad out")
        if self.has_backward:
            raise StrategyError(
                "a step for TPUs has one backward pass; add the losses up, and call backward of "
                "the sum; for several optimizers with losses of their own write several steps"
            )
        self.has_backward = True
        if self._phase is Phase.DIFFERENTIATE:
            raise ReachedParams(args[0])
        for i, tensor in enumerate(self.tensors[: self._model.num_parameters]):
            grad = self._values[i] if self._phase is Phase.LOOK else self._grads.get(i)
            if i in self._stale:
                is_old = tensor.grad is self._stale[i]
                self._leaves_old = self._leaves_old or (is_old and i in self._grads)
            tensor.grad = None
            if grad is not None and self._model.tensors[i].requires_grad:
                tensor.grad = self._library.env.j2t_iso(grad)

    def _begin(self) -> None:
        """Gives parameters gradients that the step must clear, or leave cleared."""
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
                    f"the step has written to {self._model.variables[i].name} by itself, which "
                    "may differ between replicas; let an optimizer do it, or do it between runs"
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
                "gradients would add up over steps, and in a program nothing is left of them "
                "after a run; call optimizer.zero_grad() in the step, before backward or at its "
                "end, and give whole batches instead of accumulating"
            )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._strategy is not current.strategy:
            return  # of another thread
        number = self._number.get(id(optimizer))
        if number is None:
            raise StrategyError(
                f"the step calls step() of a {type(optimizer).__name__} that the strategy does "
                "not know: make the model in strategy.scope() or give it to strategy.mirror, and "
                "the optimizer after the strategy"
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
