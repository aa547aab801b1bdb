"""Gradient hooks where gradients are reduced, or asked for. See [Note: Gradient hooks]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mirror.errors import StrategyError
from mirror.replica.gradients.ready_grads import ReplicaGrads
from mirror.replica.params.gradient_hooks import through_hooks
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam


def run_hooks(variables: Sequence[ReplicatedParam], columns: Sequence[ReplicaGrads]) -> None:
    """Has the hooks of variables see, and replace, the reduced gradients: a list per replica."""
    for i, variable in enumerate(variables):
        if variable.hooks:
            home, device = variable.home.device, columns[0][i].device
            grad = through_hooks(variable.hooks, columns[0][i].to(home))
            columns[0][i] = grad.to(device)
            for column in columns[1:]:
                column[i] = grad.to(column[i].device, copy=True)


def refuse_hooks_of(inputs: Iterable[Any]) -> None:
    """Raises if ``torch.autograd.grad`` inside ``run`` captures what a hook should see whole.

    Args:
        inputs: whose gradients are captured.
    """
    for captured in inputs:
        if not isinstance(captured, ReplicaParameter):
            continue
        variable = captured.variable
        if variable.hooks and len(variable.copies) > 1:
            raise StrategyError(
                f"torch.autograd.grad inside strategy.run gives each replica its own gradient, "
                f"but a hook of parameter {variable.name!r} has to see that of the whole batch; "
                "call it outside run, use backward(), or remove the hook"
            )
