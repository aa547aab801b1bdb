"""Finds losses that do not join: their graphs combine the examples of a part, or compare them.

A mean over examples may be taken in several steps: over the examples, then over the classes. Such
a mean can still be joined. A function of a mean, a maximum or a variance over the part cannot.
The graph is walked from the term down to the layers:

    a node                                       what it does to the first dimension
    Mean, Sum over it                            combines examples, linearly
    any other function with a ``dim`` over it    combines examples
    a function of all numbers (Var, Norm)        combines examples
    Mm, Bmm of one, Mv that contract it          combines examples (a covariance, a Gram matrix)
    Flip, Roll, Slice, Select along it           combines examples: their order matters
    Add, Neg, views, a product with a constant   nothing
    a product; a function of each number         nothing, and is not linear
    a layer, an index, a function in Python      the walk ends

A dimension is taken for the examples by its size: a multiple of each part's number of examples.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mirror.base.torch_private import arriving_shape
from mirror.replica.exactness.loss_graph import (
    Shape,
    Term,
    is_of_parameters,
    is_of_torch,
    is_parameter_operand,
    name_of,
    read_saved,
    shape_of,
)

_MOST_NODES = 48
_LINEAR = frozenset(
    "Add Alias Cat Clone Expand MaskedFill Mean Neg Permute ReshapeAlias Rsub Slice Split Squeeze "
    "Stack Sub Sum T ToCopy Transpose UnsafeView Unsqueeze View Where".split()
)
_SHAPING = frozenset(  # the output has the input's numbers in another shape
    "Cat Diagonal Expand Permute ReshapeAlias Select Slice Split Squeeze Stack T Transpose "
    "UnsafeView Unsqueeze View".split()
)
_CONTRACTING = {"Mm": ("self", "mat2"), "Bmm": ("self", "mat2"), "Mv": ("self", "vec")}
_ORDERED = frozenset("Flip Roll".split())
_LAYERS = (
    *("Addmm", "Addbmm", "Baddbmm", "Conv", "Cudnn", "Embedding", "Linear", "Mkldnn", "Native"),
    *("Scaled", "Slow", "Thnn", "Upsample"),
)
_CHOOSING = ("Gather", "Index", "MaskedSelect", "Scatter")


@dataclass(frozen=True)
class BatchDimUse:
    """One node below a term that may combine examples.

    Attributes:
        how: the node's name; "Mean" and "Sum" are linear in the examples.
        is_linear: whether the node, and everything above it, is linear.
        size: the size of the dimension that may be the examples.
        kept: the size of the next dimension, which may be the examples instead.
        rows: the result's first size; a multiple of the number of examples keeps them all.
        constants: tensors that multiply the values above the node, number by number.
        index: the only index along the dimension that the node takes, if it takes one.
    """

    how: str
    is_linear: bool
    size: int
    kept: int | None = None
    rows: int | None = None
    constants: tuple[Tensor, ...] = ()
    index: int | None = None

    def is_of_examples(self, all_of_it: Sequence[BatchDimUse], counts: Sequence[float]) -> bool:
        """Returns whether this use, with the uses of all replicas, combines examples."""
        sizes = [use.size for use in all_of_it]
        if all(m.rows and m.rows % c == 0 for m, c in zip(all_of_it, counts, strict=True)):
            return False
        if len(set(counts)) > 1 or len(set(sizes)) > 1:
            return len(set(sizes)) > 1
        if self.how in _CONTRACTING and counts[0] == 1:
            return self.size == 1
        return self.kept != counts[0] and self.size > 0 and self.size % counts[0] == 0


def batch_dim_uses(term: Term) -> list[BatchDimUse]:
    """Returns the nodes below a term that may combine examples."""
    if term.node is None:
        return []
    is_mean = name_of(term.node) in ("Mean", "Sum")
    found: list[BatchDimUse] = []
    todo = deque((n, i, is_mean, ()) for n, i in term.node.next_functions if n is not None)
    seen = set[Any]()
    while todo and len(seen) < _MOST_NODES:
        node, number, linear, constants = todo.popleft()
        if node in seen and linear:
            continue
        seen.add(node)
        name = name_of(node)
        if not is_of_torch(node) or name.startswith((*_LAYERS, *_CHOOSING)):
            continue
        linear, constants = _linearity(node, name, linear, constants)
        use = _use_of_batch_dim(node, name, linear, constants)
        if use is not None and not is_of_parameters(node):
            index = {"Select": getattr(node, "_saved_index", 0), "Unbind": number}.get(name)
            if name == "Slice" and use.rows == 1:
                index = node._saved_start
            found.append(
                use if index is None else replace(use, index=signed_dim(index) % use.size)
            )
        if name not in _CONTRACTING and (use or _is_of_each_number(node, name)):
            todo += ((n, i, linear, constants) for n, i in node.next_functions if n is not None)
    return found


def are_linear(uses: Sequence[BatchDimUse]) -> bool:
    """Returns whether one node, with its uses on all replicas, is linear in the examples."""
    if not all(m.is_linear and m.how in ("Mean", "Sum") for m in uses):
        return False
    first = uses[0].constants
    return all(
        len(m.constants) == len(first) and all(map(_are_equal, m.constants, first)) for m in uses
    )


def _are_equal(some: Tensor, other: Tensor) -> bool:
    return some.shape == other.shape and torch.equal(some.to(other.device), other)


def _use_of_batch_dim(node: Any, name: str, linear: bool, constants: Any) -> BatchDimUse | None:
    if name in _CONTRACTING:
        return _contraction(node, name)
    graphs = [i for i, (next_node, _) in enumerate(node.next_functions) if next_node is not None]
    if not graphs or name in _SHAPING - {"Select", "Slice"}:
        return None
    shape = shape_of(node, graphs[0])
    if not shape:
        return None
    if not arriving_shape(node, 0) and math.prod(shape) > 1:
        reduction = getattr(node, "_saved_reduction", 0)
        how = ("Mean", "Sum")[reduction - 1] if reduction in (1, 2) else name
        return BatchDimUse(how, linear, shape[0], constants=constants)
    if name.startswith("Linalg") and len(shape) == 2 and not hasattr(node, "_saved_dim"):
        return BatchDimUse(name, False, shape[0])
    dims = getattr(node, "_saved_dims" if name in _ORDERED else "_saved_dim", None)
    if dims is None:
        return None
    listed = dims if isinstance(dims, tuple) else (dims,)
    if 0 not in [signed_dim(dim) % len(shape) for dim in listed]:
        return None
    kept = shape[1] if len(shape) > 2 else None
    rows = arriving_shape(node, 0)[0] if name == "Slice" else None
    return BatchDimUse(name, linear, shape[0], kept, rows, constants)


def _contraction(node: Any, name: str) -> BatchDimUse | None:
    """Returns the use by a product of matrices: it contracts the first one's columns."""
    output = arriving_shape(node, 0)
    if name == "Bmm" and output[0] != 1:
        return None
    left, right = (next_node for next_node, _ in node.next_functions)
    shape = shape_of(node, 0) if left else tuple(read_saved(node, _CONTRACTING[name][0]).shape)
    for operand in (left, right):
        if is_parameter_operand(operand):
            return None
    rows = None if left is not None and _is_transposed(left) else shape[-2]
    return BatchDimUse(name, False, shape[-1], rows=rows)


def _is_transposed(node: Any) -> bool:
    """Returns whether a matrix is a transposed one, its columns the first dimension before."""
    for _ in range(8):
        name = name_of(node)
        if name == "Permute":
            return bool(node._saved_dims[-1] == 0)
        if name in ("T", "Transpose"):
            return name == "T" or 0 in (node._saved_dim0, node._saved_dim1)
        graphs = [next_node for next_node, _ in node.next_functions if next_node is not None]
        if (
            not graphs
            or name.startswith((*_LAYERS, *_CHOOSING))
            or not _is_of_each_number(node, name)
        ):
            return False
        node = graphs[0]
    return False


def _is_of_each_number(node: Any, name: str) -> bool:
    """Returns whether each number of a node's output depends on one number of each input.

    A function along a dimension counts too; one along the first dimension is a use of it.
    """
    if name in _SHAPING or getattr(node, "_saved_dim", None) is not None:
        return True
    shape = arriving_shape(node, 0)
    return all(
        next_node is None or _fits(shape_of(node, i), shape)
        for i, (next_node, _) in enumerate(node.next_functions)
    )


def _fits(some: Shape, shape: Shape) -> bool:
    """Returns whether a shape broadcasts to another one."""
    pairs = zip(reversed(some), reversed(shape), strict=False)
    return len(some) <= len(shape) and all(a in (1, b) for a, b in pairs)


def _linearity(node: Any, name: str, linear: bool, constants: Any) -> tuple[bool, Any]:
    if not linear or name in _LINEAR or getattr(node, "_saved_reduction", 0) in (1, 2):
        return linear, constants
    if name not in ("Mul", "Div"):
        return False, constants
    inputs = [next_node for next_node, _ in node.next_functions]
    if len(inputs) == 1:
        return True, constants
    if None not in inputs:
        are_same = [is_parameter_operand(next_node) for next_node in inputs]
        return are_same[1] or (are_same[0] and name == "Mul"), constants
    if name == "Div" and inputs[0] is None:
        return False, constants
    other = read_saved(node, "self" if inputs[0] is None else "other")
    if isinstance(other, Tensor) and other.dim():
        return True, (*constants, other)
    return True, constants


def signed_dim(dim: int) -> int:
    return dim - 2**64 if dim >= 2**63 else dim


_MAX_STEPS = 64
_SCALED = frozenset("Clone Div ToCopy".split())
_MOST_SCALINGS = 4  # a cosine divides by the norm
_BROADCASTING = frozenset("Add Mul Sub".split())
_PRODUCTS = frozenset("Bmm Cdist EuclideanDist Mm".split())
_SAVED = {"Mm": ("self", "mat2"), "Bmm": ("self", "mat2"), "Cdist": ("x1", "x2")}


def compare_examples(terms: Sequence[Term], counts: Sequence[float]) -> bool:
    """Returns whether the replicas' terms compare the examples of their own part.

    A contrastive loss (CLIP's, SimCLR's) compares every example of the batch with every other one.
    A replica computes the comparisons within its part only, and no weights make up for those
    between parts. Two patterns show such a loss; in both, the numbers of rows and of columns are
    multiples of the part's number of examples, which is at least two:

        a product or distance of two matrices, neither of them a parameter
        a sum, difference or product of rows that broadcast, or are expanded, against each other

    A matrix without a graph (of a frozen encoder) holds examples if the parts differ in size, or
    if the matrix differs between replicas; else it may be a table of constants.

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
    for _ in range(_MAX_STEPS):
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
                constant = read_saved(node, _SAVED[name][without[0]]) if without else None
                yield shape[-2], shape[-1], constant
        elif node is root or not _is_layer(node, name):
            if name in _BROADCASTING and _are_rows_and_columns(node):
                rows, columns = arriving_shape(node, 0)[:2]
                yield rows, columns, None
                continue
            found += [next_node for next_node, _ in node.next_functions if next_node is not None]


def _is_layer(node: Any, name: str) -> bool:
    """Returns whether a walk ends at a node: a layer, or a function in Python."""
    if name in _PRODUCTS or name.startswith(_LAYERS):
        return True
    return name != "CopySlices" and not is_of_torch(node)  # what was written in place


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
