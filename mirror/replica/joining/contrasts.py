"""Contrasts: whether a term is made of products or distances of examples with each other.

A contrastive loss (CLIP's, SimCLR's) compares every example of the batch with every other. Of a
part each replica has the comparisons within it alone, and those between parts are missing: no
weights make the whole batch's loss of that. What shows it is a product of two matrices, none of
them a parameter, whose rows and whose columns are as many as the part has examples, or a multiple.
Differences of broadcast rows do not show it, nor parts of one example each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mirror.replica.joining.scalar_terms import (
    OF_PARAMETERS,
    Term,
    is_of_parameters,
    name_of,
    shape_of,
)

_MOST_NODES = 64
_PRODUCTS = {"Mm": -1, "Bmm": -1, "Cdist": -2, "EuclideanDist": -2}  # the columns in the second
_PASSED = frozenset(
    "Abs Add Alias Cat Clamp ClampMax ClampMin Clone Diagonal Div Exp Gather Index Log "
    "LogSigmoid LogSoftmax Logsumexp MaskedFill MaskedSelect Max Mean Min Mul Neg Permute Pow "
    "Relu ReshapeAlias Rsub Select Sigmoid Slice Softmax Softplus Sqrt Squeeze Sub Sum T Tanh "
    "ToCopy Transpose UnsafeView Unsqueeze View Where".split()
)


def compare_examples(terms: Sequence[Term], counts: Sequence[float]) -> bool:
    """Whether the terms of all replicas compare the examples of each one's part.

    Args:
        counts: the replicas' numbers of examples.
    """
    if max(counts) <= 1:
        return False
    found = [list(_products_below(term.node)) for term in terms]
    return any(
        _are_multiples([rows for rows, _ in products], counts)
        and _are_multiples([columns for _, columns in products], counts)
        for products in zip(*found, strict=False)
    )


def _products_below(root: Any) -> Iterator[tuple[int, int]]:
    """Yields the rows and columns of the first products and distances below a node."""
    found = [root]
    for _ in range(_MOST_NODES):
        if not found:
            return
        node = found.pop()
        name = name_of(node)
        if name in _PRODUCTS and not any(map(_is_parameter, node.next_functions)):
            rows, columns = shape_of(node, 0), shape_of(node, 1)
            if all(size == 1 for size in rows[:-2]):
                yield rows[-2], columns[_PRODUCTS[name]]
        elif node is root or name in _PASSED:
            found += [following for following, _ in node.next_functions if following is not None]


def _is_parameter(operand: tuple[Any, int]) -> bool:
    """Whether an operand is made of parameters alone, or has no graph."""
    node = operand[0]
    return node is None or (name_of(node) in OF_PARAMETERS and is_of_parameters(node))


def _are_multiples(sizes: Sequence[int], counts: Sequence[float]) -> bool:
    multiple = sizes[0] / counts[0]
    return multiple >= 1 and all(s == multiple * c for s, c in zip(sizes, counts, strict=True))
