"""Keras optimizers inside ``run``: their variables are there once, so replicas step together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mirror.compiler import opaque
from mirror.concurrency.merge_point import MergePoint
from mirror.errors import StrategyError
from mirror.execution.current import current
from mirror.execution.replicas import Replica
from mirror.execution.run import Run
from mirror.execution.runner import runner_of
from mirror.replica.keras.library import computing_on, library
from mirror.torch_private import wrap_once


def watch_optimizers() -> None:
    """Has ``apply`` inside ``run`` done once for all replicas; once, for good."""
    wrap_once(library().optimizers.Optimizer, "apply", _once_for_all)


def _once_for_all(original: Callable[..., Any]) -> Callable[..., Any]:
    @opaque
    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        replica = current.replica
        if replica is None or not replica.replicas.mirrors:
            return original(optimizer, grads, trainable_variables)
        call = functools.partial(original, optimizer)
        return _merged(replica, call, grads, trainable_variables)

    return apply


def _merged(replica: Replica, call: Callable[..., Any], grads: Any, variables: Any) -> Any:
    grads = list(grads)
    variables = None if variables is None else list(variables)
    run = replica.run
    assert isinstance(run, Run)
    runner, home = runner_of(replica.replicas), replica.replicas.devices[0]

    def action(payloads: dict[int, Any]) -> dict[int, Any]:
        (own, named), *others = payloads.values()
        for theirs, _ in others:
            _check_equal(own, theirs)

        def step() -> Any:
            with computing_on(home), torch.no_grad():
                return call([None if g is None else g.to(home) for g in own], named)

        result = runner.call_outside(run, step)
        return dict.fromkeys(payloads, result)

    point = MergePoint("optimizer.apply", len(grads), (grads, variables), action)
    return run.merge(replica.replica_id, point)


def _check_equal(own: list[Any], theirs: list[Any]) -> None:
    """Refuses gradients of the replicas' own, of which the first alone would be applied."""
    for one, other in zip(own, theirs, strict=True):
        if (one is None) is not (other is None) or (
            one is not None and not torch.equal(one, other.to(one.device))
        ):
            raise StrategyError(
                "the replicas call apply of a Keras optimizer with different gradients; give it "
                "[v.value.grad for v in variables] after backward(), which is the reduced one, "
                'or reduce them: context.all_reduce("mean", gradients)'
            )
