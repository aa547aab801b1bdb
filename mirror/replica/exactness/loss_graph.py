"""Reads the terms of a 0-d value from its autograd graph, and facts about each term."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from mirror.base.torch_private import ACCUMULATES, arriving_shape
from mirror.replica.exactness.node_classes import (
    ADDS,
    CHOICES,
    COLLECTIVE,
    ELEMENTWISE,
    FUNCTIONS,
    JOINED,
    MASKS,
    MOVES,
    SCALES,
    STATISTICS,
    SUMS,
    UNREADABLE,
    VIEWS,
    Shape,
    UnknownNode,
    inputs_of,
    is_of_parameters,
    is_of_torch,
    name_of,
    read_saved,
    shape_of,
    walk,
)

T = TypeVar("T")

_MOST_NODES = 1000
_MOST_BELOW = 32  # nodes below a reduction
_RANKED = ("Gather", "Sort", "Topk")  # one entry of their result is no term


@dataclass(frozen=True)
class Term:
    """One summand of one replica's value.

    Attributes:
        kind: "same", "constant", "mean", "sum", "cross entropy", "unknown", or the description
            of a value that cannot be joined.
        shape: the shape of the tensor that is reduced.
        node: the node that reduces it.
        factors: numbers by which the term is divided (True) or multiplied (False).
        facts: the results of ``read``, by function.
    """

    kind: str
    shape: Shape = ()
    node: Any = None
    factors: tuple[tuple[bool, Any], ...] = ()
    facts: dict[Any, Any] = field(default_factory=dict, compare=False)

    def read(self, fact: Callable[[Term], T]) -> T:
        """Returns a fact of the graph. It is kept, since a backward pass frees saved tensors."""
        if fact not in self.facts:
            self.facts[fact] = fact(self)
        found: T = self.facts[fact]
        return found

    def detach(self) -> Term:
        """Returns the term with its facts and numbers, without its graph."""
        factors = tuple((is_div, abs(float(value))) for is_div, value in self.factors)
        return replace(self, node=None, factors=factors)


def terms_or_unknown(root: Any) -> list[Term]:
    """Returns the terms of a value; one of kind "unknown" if the nodes show none."""
    try:
        return list(_terms_of(root))
    except UNREADABLE:
        return [Term("unknown")]


def _terms_of(root: Any) -> Iterator[Term]:
    todo: list[tuple[Any, tuple[tuple[bool, Any], ...]]] = [(root, ())]
    for _ in range(_MOST_NODES):
        if not todo:
            return
        node, factors = todo.pop()
        if node is None:
            yield Term("constant")
            continue
        name, inputs = name_of(node), inputs_of(node)
        if name in ADDS:
            todo += [(below, factors) for below in inputs]
        elif name in MOVES or (name in VIEWS and math.prod(node._saved_self_sym_sizes) == 1):
            todo.append((inputs[0], factors))
        elif name in SUMS and _is_stack_of_scalars(inputs[0]):
            summands = inputs_of(inputs[0])
            if name == "Mean":
                factors = (*factors, (True, float(len(summands))))
            todo += [(below, factors) for below in summands]
        elif name == "Where" and sum(below is not None for below in inputs) == 1:
            # The other branch is a constant: Keras writes regularizers over no examples so.
            todo += [(below, factors) for below in inputs if below is not None]
        elif name in SCALES:
            is_div = name == "Div"
            if len(inputs) == 1 or inputs[1] is None:
                todo.append((inputs[0], (*factors, (is_div, read_saved(node, "other")))))
            elif inputs[0] is None and not is_div:
                todo.append((inputs[1], (*factors, (False, read_saved(node, "self")))))
            elif is_of_parameters(inputs[1]):
                todo.append((inputs[0], factors))
            elif not is_div and is_of_parameters(inputs[0]):
                todo.append((inputs[1], factors))
            else:
                yield Term("a product or quotient of numbers that all come from the batch")
        else:
            try:
                term = _term_of_reduction(node, name, inputs)
            except UnknownNode:
                term = Term("unknown", node=node)  # the other terms may be known
            inner = _inner_factors(inputs[0]) if term.kind in ("mean", "sum") else ()
            yield replace(term, factors=(*factors, *inner))
    raise UnknownNode


def _is_stack_of_scalars(node: Any) -> bool:
    if name_of(node) not in JOINED or arriving_shape(node, 0) != (len(node.next_functions),):
        return False
    # A part of one example may join values of one number each, too.
    views = inputs_of(node) if name_of(node) == "Cat" else []
    return all(name_of(view) in VIEWS and shape_of(view, 0) == () for view in views)


def _inner_factors(node: Any) -> Iterator[tuple[bool, Any]]:
    """Yields the numbers by which the whole reduced tensor is multiplied or divided."""
    for _ in range(_MOST_BELOW):
        name, inputs = name_of(node), inputs_of(node) if node else []
        graphs = [below for below in inputs if below is not None]
        if len(graphs) != 1 or name not in MOVES | VIEWS | SCALES | MASKS | {"Sum"}:
            return
        if name in SCALES and (inputs[0] is not None or name == "Mul"):
            other = read_saved(node, "other" if inputs[0] is not None else "self")
            if not isinstance(other, Tensor) or other.dim() == 0:
                yield name == "Div", other
        node = graphs[0]


def _term_of_reduction(node: Any, name: str, inputs: list[Any]) -> Term:
    if name == ACCUMULATES:
        if is_of_parameters(node):
            return Term("same")
    elif name in SUMS:
        return Term(name.lower(), tuple(node._saved_self_sym_sizes), node)
    elif name.startswith("NllLoss") and node._saved_reduction == 1:
        return Term("cross entropy", node=node)
    elif "Loss" in name or "CrossEntropy" in name:
        reduction = node._saved_reduction
        if reduction in (1, 2) and inputs[0] is not None:
            return Term("mean" if reduction == 1 else "sum", shape_of(node, 0), node)
    elif name in ("Lerp", "Select") and name_of(inputs[0]) in _RANKED:
        return Term("one of the part's values in their order")
    elif name == COLLECTIVE or (is_of_torch(node) and is_of_parameters(node)):
        return Term("same")
    elif name in FUNCTIONS | STATISTICS | {"Bmm", "Dot"}:
        return Term(f"what {name.lower()} makes of the part")
    elif _is_function_of_numbers(node, name):
        return Term(f"what {name.lower()} makes of numbers of the part")
    raise UnknownNode


def _is_function_of_numbers(node: Any, name: str) -> bool:
    """Returns whether a node of torch computes a number from numbers that have a graph."""
    if not is_of_torch(node) or name in VIEWS | MASKS:
        return False
    shapes = [shape_of(node, i) for i, below in enumerate(inputs_of(node)) if below is not None]
    return bool(shapes) and all(math.prod(shape) == 1 for shape in shapes)


def _walk_below(term: Term) -> Iterator[Any]:
    """Yields the elementwise nodes below a term, and the first other node of each branch."""
    roots = inputs_of(term.node)[:1] if term.node is not None else []
    nodes = walk(roots, lambda node: name_of(node) in ELEMENTWISE | VIEWS)
    return itertools.islice(nodes, _MOST_BELOW)


def is_of_chosen(term: Term) -> bool:
    """Returns whether a mask, or indices, may have chosen what is reduced."""
    return any(name_of(node) in CHOICES for node in _walk_below(term))


def rows_viewed(term: Term) -> set[int]:
    """Returns the first dimensions of what was viewed in another shape."""
    views = (node for node in _walk_below(term) if name_of(node) in VIEWS)
    return {size for node in views for size in node._saved_self_sym_sizes[:1]}


def is_same(term: Term) -> bool:
    """Returns whether a term depends on parameters or on values of all replicas only."""
    return term.node is not None and is_of_parameters(term.node)


def is_loss(term: Term) -> bool:
    """Returns whether one of torch's loss functions reduces the term."""
    return hasattr(term.node, "_saved_reduction")


def total_weight(term: Term) -> Any:
    """Returns the weight of the targets that a cross entropy does not ignore."""
    return read_saved(term.node, "total_weight")


def mask_sums(term: Term) -> list[float]:
    """Returns the sums of all tensors that may be the mask of a sum."""
    sums: list[float] = []
    for node in _walk_below(term):
        name = name_of(node)
        for key in ("other", "self") if name == "Mul" else ():
            mask = read_saved(node, key)
            if isinstance(mask, Tensor) and mask.dim() and not mask.requires_grad:
                sums.append(float(mask.sum()))
        if name in MASKS:
            mask = read_saved(node, "mask" if name == "MaskedFill" else "condition")
            chosen = float(mask.sum())
            sums += [mask.numel() - chosen, chosen]
        if name in CHOICES:
            sums += [float(math.prod(term.shape[:1])), float(math.prod(term.shape))]
    return sums
