"""The user's modules and optimizers on a worker: modules pull, optimizers push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.errors import StrategyError
from mirror.replica.optimizers.piecewise_optimizers import options_of, rebuild
from mirror.server.persistent_ids import load
from mirror.server.pull_on_read import watch
from mirror.server.recorded_model import Model, is_table_of_rows
from mirror.server.roles.variable_client import VariableClient
from mirror.server.roles.worker_datasets import num_examples


class WorkerModel:
    """Modules that pull before they are read, and optimizers that push.

    Args:
        pickled: the root modules, with persistent ids for tensors.
        specs: of each tensor the shape, dtype, device, ``requires_grad`` (None for a buffer), and
            whether it is a table.
        make_client: returns the client for the tensors.
        push: called with the index of an optimizer that steps.

    Attributes:
        largest_call: the largest number of examples of a call of a root module in this step.
    """

    def __init__(
        self,
        pickled: Any,
        specs: Sequence[Any],
        make_client: Callable[[Sequence[Tensor]], VariableClient],
        push: Callable[[int], None],
    ) -> None:
        tensors = [_empty_variable(*spec) for spec in specs]
        roots = load(pickled, lambda token: tensors[token[1]])
        self.model = Model(roots)
        self.tensors = tensors
        self.names = [variable.name for variable in self.model.variables]
        self.client = make_client(tensors)
        self.optimizers: list[Optimizer] = []
        self.largest_call = 0
        self._push = push
        self._options: list[Any] = []
        self._active_tables: set[int] = set()
        self._indices = {id(tensor): i for i, tensor in enumerate(tensors)}
        for module in self.model.modules:
            table = None
            if is_table_of_rows(module):
                table = self._indices[id(module.weight)]
                if self.client.layout.variables[table].by_rows:
                    self._pull_rows_in_calls(module, table)
            watch(module, self._before_read(module, table))
        for root in roots:
            root.register_forward_pre_hook(self._record_call, with_kwargs=True)

    def add_optimizer(self, description: Any) -> None:
        """Creates an optimizer of the user's class; its ``step`` pushes."""
        optimizer = rebuild(description, lambda index: [self.tensors[index]])  # type: ignore[list-item]
        index = len(self.optimizers)

        def step(closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if repr(options_of(optimizer)) != self._options[index]:
                raise StrategyError(
                    f"a step has changed the options of {type(optimizer).__name__}; change them, "
                    "and step schedulers, between steps, in the coordinator's process"
                )
            self._push(index)
            return loss

        optimizer.step = step  # type: ignore[method-assign]
        self.optimizers.append(optimizer)
        self._options.append(repr(options_of(optimizer)))

    def set_options(self, index: int, options: Sequence[Any]) -> None:
        """Sets the hyperparameters that the coordinator's process has sent."""
        for group, values in zip(self.optimizers[index].param_groups, options, strict=True):
            group.update(values)
        self._options[index] = repr(options_of(self.optimizers[index]))

    def members(self, index: int) -> list[int]:
        """Returns the indices of an optimizer's variables."""
        groups = self.optimizers[index].param_groups
        return [self._indices[id(p)] for group in groups for p in group["params"]]

    def begin(self, flags: Sequence[bool]) -> None:
        """Prepares a step: no gradients, the coordinator's modes, values to be pulled again."""
        self.client.is_fresh = False
        self.largest_call = 0
        for tensor in self.tensors:
            tensor.grad = None
        for module, flag in zip(self.model.modules, flags, strict=False):
            if module.training != flag:
                module.training = flag
        for tensor, flag in zip(self.tensors, flags[len(self.model.modules) :], strict=False):
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)

    def _before_read(self, module: nn.Module, table: int | None) -> Callable[[str | None], None]:
        def before(name: str | None) -> None:
            if not self.client.is_fresh:
                self.client.pull()
            if table is not None and name == "weight" and id(module) not in self._active_tables:
                self.client.pull_tables()

        return before

    def _pull_rows_in_calls(self, module: nn.Module, table: int) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.client.is_fresh:
                self.client.pull()
            ids = args[0] if args else kwargs["input"]
            self.client.pull_rows(table, ids)
            self._active_tables.add(id(module))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._active_tables.discard(id(module))

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)

    def _record_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        count = num_examples((*args, *kwargs.values()))
        self.largest_call = max(self.largest_call, count or 0)


def _empty_variable(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
    requires_grad: bool | None,
    by_rows: bool,
) -> Tensor:
    """Returns a parameter, or a buffer, without values."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if by_rows:
        tensor.fill_(torch.nan)  # so that reading a row before it is pulled is visible
    return tensor if requires_grad is None else nn.Parameter(tensor, requires_grad=requires_grad)
