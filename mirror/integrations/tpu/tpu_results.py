"""The outputs of a program: described when it is traced, and regrouped as the results of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.errors import StrategyError, StructureError, short_repr
from mirror.integrations.tpu.tpu_arguments import TpuArguments
from mirror.integrations.tpu.tpu_copies import from_numpy
from mirror.strategy.run_arguments import regroup
from mirror.values import describe_structure, leaves_of, rebuild_structure


class ProgramOutput:
    """The outputs of one branch of a program.

    Attributes:
        tree: their structure; its leaves have no meaning.
        leaves: for each leaf an object with its shape and dtype, or a list with the value itself.
    """

    def __init__(self, tree: Any, leaves: list[Any]) -> None:
        self.tree, self.leaves = tree, leaves


def split_arrays(env: Any, result: Any) -> tuple[list[Any], ProgramOutput]:
    """Returns the arrays of a step's result, and its other leaves with ``None`` for each array."""
    arrays: list[Any] = []
    leaves: list[Any] = []
    for leaf in leaves_of(result):
        if hasattr(leaf, "jax"):  # a tensor of torchax, or a view of one
            arrays.append(env.t2j_iso(leaf))
            leaves.append(None)
        else:
            leaves.append([leaf])
    return arrays, ProgramOutput(result, leaves)


def find_widest(outputs: Sequence[ProgramOutput | None]) -> list[tuple[tuple[int, ...], Any]]:
    """Returns shape and dtype of each output array, the largest of all branches.

    Raises:
        StructureError: the branches differ in structure, or in more than sizes.
    """
    present = [output for output in outputs if output is not None]
    structures = {describe_structure(output.tree) for output in present}
    if len(structures) > 1:
        raise StructureError(
            f"the replicas returned different structures, {' and '.join(sorted(structures))}; "
            "return the same structure for any number of examples"
        )
    widest = []
    for leaves in zip(*(output.leaves for output in present), strict=True):
        if all(type(leaf) is list for leaf in leaves):
            continue
        kinds = {_kind(leaf) for leaf in leaves}
        if len(kinds) > 1:
            raise StructureError(
                "an output must be of one dtype and number of dimensions for any number of "
                f"examples; got {' and '.join(sorted(kinds))}; convert it in the step"
            )
        shape = tuple(max(sizes) for sizes in zip(*(x.shape for x in leaves), strict=True))
        widest.append((shape, leaves[0].dtype))
    return widest


def _kind(leaf: Any) -> str:
    if type(leaf) is list:
        return short_repr(leaf[0])
    return f"a {leaf.dtype} tensor of {len(leaf.shape)} dimensions"


def regroup_outputs(
    outputs: Sequence[Any],
    arrays: Sequence[Any],
    arguments: TpuArguments,
    refusal: str | None,
) -> Any:
    """Returns a run's results regrouped.

    Args:
        outputs: the output of each kind of replica; ``None`` for an idle one.
        arrays: the padded results of all replicas, stacked.
        refusal: the reason in the error of a backward pass from a result; ``None`` allows it.
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
            region: Any = (r, *map(slice, leaf.shape))
            leaves.append(_tensor(next(found)[region], refusal))
        results[r] = rebuild_structure(output.tree, leaves)
    return regroup(results, len(arguments.which), arguments.counts)


def _tensor(array: Any, refusal: str | None) -> Tensor:
    value = from_numpy(np.asarray(array))
    if refusal is None or not value.is_floating_point():
        return value
    refused: Tensor = _refused(value, refusal, torch.zeros((), requires_grad=True))
    return refused


class _RefusedGradient(torch.autograd.Function):
    """Returns a value unchanged, and raises StrategyError in a backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, refusal: str, anchor: Tensor) -> Tensor:
        ctx.refusal = refusal
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise StrategyError(f"backward outside of run: {ctx.refusal}")


_refused: Any = _RefusedGradient.apply  # untyped
