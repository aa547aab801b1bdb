"""What the branches of a program return: arrays, and values that are known when it is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mirror.errors import StructureError, short_repr
from mirror.values import describe_structure, leaves_of


class ProgramOutput:
    """What one branch of a program returns.

    Attributes:
        tree: the structure, with anything as leaves.
        leaves: of each leaf what has its shape and dtype, or the value itself in a list.
    """

    def __init__(self, tree: Any, leaves: list[Any]) -> None:
        self.tree, self.leaves = tree, leaves


def opened(env: Any, result: Any) -> tuple[list[Any], ProgramOutput]:
    """Returns the arrays in what a step has returned, and the rest; ``None`` for each array."""
    arrays: list[Any] = []
    leaves: list[Any] = []
    for leaf in leaves_of(result):
        if hasattr(leaf, "jax"):  # a tensor of torchax, or a view of one
            arrays.append(env.t2j_iso(leaf))
            leaves.append(None)
        else:
            leaves.append([leaf])
    return arrays, ProgramOutput(result, leaves)


def widest_of(outputs: Sequence[ProgramOutput | None]) -> list[tuple[tuple[int, ...], Any]]:
    """Returns shape and dtype of each array that comes out, the largest of all branches.

    Raises:
        StructureError: they differ in structure, or in more than their sizes.
    """
    present = [output for output in outputs if output is not None]
    said = {describe_structure(output.tree) for output in present}
    if len(said) > 1:
        raise StructureError(
            f"the replicas returned different structures, {' and '.join(sorted(said))}; return "
            "the same structure for any number of examples"
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
