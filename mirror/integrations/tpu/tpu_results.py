"""What a program has returned, as the results of a run: each replica's own, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.errors import StrategyError
from mirror.integrations.tpu.tpu_arguments import TpuArguments
from mirror.integrations.tpu.tpu_copies import from_numpy
from mirror.strategy.run_arguments import regroup
from mirror.values import rebuild_structure


def results_of(
    outputs: Sequence[Any],
    arrays: Sequence[Any],
    arguments: TpuArguments,
    refusal: str | None,
) -> Any:
    """Returns a run's results regrouped.

    Args:
        outputs: what each kind of replica returns; ``None`` for one that sits out.
        arrays: the padded results, all replicas' in each.
        refusal: what a backward pass from here raises; ``None``: there was one in the step.
    """
    host: list[Any] = [np.asarray(array) for array in arrays]
    results: dict[int, Any] = {}
    for r, k in enumerate(arguments.which):
        output = outputs[k]
        if output is None:
            continue
        found, leaves = iter(host), []
        for leaf in output.leaves:
            if type(leaf) is list:
                leaves.append(leaf[0])
                continue
            place: Any = (r, *map(slice, leaf.shape))
            leaves.append(_tensor(next(found)[place], refusal))
        results[r] = rebuild_structure(output.tree, leaves)
    return regroup(results, len(arguments.which), arguments.counts)


def _tensor(array: Any, refusal: str | None) -> Tensor:
    value = from_numpy(np.asarray(array))
    if refusal is None or not value.is_floating_point():
        return value
    refused: Tensor = _refused(value, refusal, torch.zeros((), requires_grad=True))
    return refused


class _RefusedGradient(torch.autograd.Function):
    """Gives a value through, and no gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, refusal: str, anchor: Tensor) -> Tensor:
        ctx.refusal = refusal
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise StrategyError(f"backward outside of run: {ctx.refusal}")


_refused: Any = _RefusedGradient.apply  # untyped
