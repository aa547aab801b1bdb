"""Detects contrastive losses: terms that compare the examples of a part with each other.

A contrastive loss (CLIP's, SimCLR's) compares every example of the batch with every other one. A
replica computes the comparisons within its part only, and no weights make up for those between
parts. Two patterns show such a loss; in both, the numbers of rows and of columns are multiples of
the part's number of examples, which is at least two:

    a product or distance of two matrices, neither of them a parameter
    a sum, difference or product of rows that broadcast, or are expanded, against each other

A matrix without a graph (of a frozen encoder) holds examples if the parts differ in size, or if
the matrix differs between replicas; else it may be a table of constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mirror.base.torch_private import arriving_shape
from mirror.replica.exactness.loss_graph import (
    Shape,
    Term,
    is_parameter_operand,
    name_of,
    saved,
    shape_of,
)

_MOST_NODES = 64
_BROADCASTING = frozenset("Add Mul Sub".split())
_PRODUCTS = frozenset("Bmm Cdist EuclideanDist Mm".split())
_SAVED = {"Mm": ("self", "mat2"), "Bmm": ("self", "mat2"), "Cdist": ("x1", "x2")}
_SCALED = frozenset("Clone Div ToCopy".split())
_MOST_SCALINGS = 4  # a cosine divides by the norm
_PASSED = frozenset(
    "Abs Add Alias Cat Clamp ClampMax ClampMin Clone Diagonal Div Exp Gather Index Log "
    "LogSigmoid LogSoftmax Logsumexp MaskedFill MaskedSelect Max Mean Min Mul Neg Permute Pow "
    "Relu ReshapeAlias Rsub Select Sigmoid Slice Softmax Softplus Sqrt Squeeze Sub Sum T Tanh "
    "ToCopy Transpose UnsafeView Unsqueeze View Where".split()
)


def compare_examples(terms: Sequence[Term], counts: Sequence[float]) -> bool:
    """Returns whether the replicas' terms compare the examples of their own part.

    Args:
        counts: the replicas' numbers of examples.
    """
    if max(counts) <= 1:
        return False
    found = [term.read(products_below) for term in terms]
    return any(
        _are_multiples([rows for rows, _, _ in products], counts)
        and _are_multiples([columns for _, columns, _ in products], counts)
        and (len(set(counts)) > 1 or _differ([constant for _, _, constant in products]))
        for products in zip(*found, strict=False)
    )


def products_below(term: Term) -> list[tuple[int, int, Any]]:
    """Returns rows, columns and constant operand of products and distances below a term."""
    return list(_products_below(term.node))


def _products_below(root: Any) -> Iterator[tuple[int, int, Any]]:
    """Yields the first products and distances below a node.

    Each is its number of rows, of columns, and the operand without a graph or ``None``.
    """
    found = [root]
    for _ in range(_MOST_NODES):
        if not found:
            return
        node = found.pop()
        name = name_of(node)
        if name == "Pdist":
            rows = shape_of(node, 0)[0]
            yield rows, rows, None
        elif name in _PRODUCTS and not any(
            is_parameter_operand(operand) for operand, _ in node.next_functions
        ):
            without = [i for i, (next_node, _) in enumerate(node.next_functions) if not next_node]
            shape = arriving_shape(node, 0)
            if without and name not in _SAVED:
                continue
            if all(size == 1 for size in shape[:-2]):
                constant = saved(node, _SAVED[name][without[0]]) if without else None
                yield shape[-2], shape[-1], constant
        elif node is root or name in _PASSED:
            if name in _BROADCASTING and _are_rows_and_columns(node):
                rows, columns = arriving_shape(node, 0)[:2]
                yield rows, columns, None
                continue
            found += [next_node for next_node, _ in node.next_functions if next_node is not None]


def _are_rows_and_columns(node: Any) -> bool:
    """Returns whether a node's inputs broadcast to each other along their first dimensions."""
    operands = node.next_functions
    if len(operands) != 2 or any(next_node is None for next_node, _ in operands):
        return False
    if any(is_parameter_operand(operand) for operand, _ in operands):
        return False
    first, second = _shape_before_expand(node, 0)[:2], _shape_before_expand(node, 1)[:2]
    return len(first) == len(second) == 2 and (
        (first[1] == second[0] == 1) or (first[0] == second[1] == 1)
    )


def _shape_before_expand(node: Any, i: int) -> Shape:
    """Returns the shape of an operand; of one that was expanded, the shape before."""
    shape, below = shape_of(node, i), node.next_functions[i][0]
    for _ in range(_MOST_SCALINGS):
        if name_of(below) == "Expand":
            return shape_of(below, 0)
        if name_of(below) not in _SCALED or below.next_functions[0][0] is None:
            break
        below = below.next_functions[0][0]
    return shape


def _differ(constants: Sequence[Any]) -> bool:
    """Returns whether operands without a graph differ between replicas; True without any."""
    first = constants[0]
    if first is None:
        return True
    return not all(torch.equal(constant.to(first.device), first) for constant in constants[1:])


def _are_multiples(sizes: Sequence[int], counts: Sequence[float]) -> bool:
    multiple = sizes[0] / counts[0]
    return multiple >= 1 and all(s == multiple * c for s, c in zip(sizes, counts, strict=True))
