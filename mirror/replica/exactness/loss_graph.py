"""Reads the terms of a 0-d value from its autograd graph, and facts about each term."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from mirror.base.torch_private import ACCUMULATES, arriving_shape
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter

Shape = tuple[int, ...]
T = TypeVar("T")

_MOST_NODES = 1000
_MOST_BELOW = 32  # nodes below a reduction
_MOST_OF_PARAMETERS = 4096  # a penalty may be of all parameters of a model
_PASSED = frozenset("Alias Clone Neg Permute T ToCopy Transpose".split())
_JOINED = frozenset("Cat Permute Select Slice Split Stack T Transpose Unbind".split())
_RESHAPED = frozenset("View UnsafeView Squeeze Unsqueeze ReshapeAlias Expand".split())
_ELEMENTWISE = frozenset(
    "Abs Add Clamp ClampMax ClampMin Clone Div Exp Log MaskedFill Mul Neg Pow Relu Rsub Sigmoid "
    "Softplus Sqrt Sub Tanh ToCopy Where".split()
)
_LINEAR = _PASSED | _RESHAPED | frozenset("Div MaskedFill Mul Where".split())
_PRODUCTS = frozenset("Mm Bmm T Transpose Permute".split())
_COLLECTIVE = "GradSend"  # a collective's result, the same on all replicas
# Nodes of values that may depend on parameters only.
OF_PARAMETERS = _ELEMENTWISE | _PRODUCTS | _RESHAPED | {ACCUMULATES, _COLLECTIVE}
CHOICES = frozenset("Index MaskedSelect".split())
_NONLINEAR = frozenset(
    "Abs Bmm Clamp ClampMax ClampMin Dot Exp Kthvalue LinalgVectorNorm Log Logsumexp Max Median "
    "Min Nanmedian Norm Pow Relu Sqrt Std StdMean Var VarMean".split()
)
_ORDERED = frozenset("Gather Sort Topk".split())  # one entry of their result is no term
_ALSO_OF_PARAMETERS = _NONLINEAR | frozenset("Mean Select Slice Stack Sum".split())


class UnknownNode(Exception):
    """The nodes do not show how a value was computed."""


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
        return Term(self.kind, self.shape, None, factors, self.facts)


def terms_or_unknown(root: Any) -> list[Term]:
    """Returns the terms of a value; one of kind "unknown" if the nodes show none."""
    try:
        return list(terms_of(root))
    except (UnknownNode, AttributeError, RuntimeError):  # new torch, hook, or freed graph
        return [Term("unknown")]


def terms_of(root: Any) -> Iterator[Term]:
    """Yields the terms of a value.

    Raises:
        UnknownNode: the graph has too many nodes.
    """
    found: list[tuple[Any, tuple[tuple[bool, Any], ...]]] = [(root, ())]
    seen = 0
    while found:
        node, factors = found.pop()
        seen += 1
        if seen > _MOST_NODES:
            raise UnknownNode
        if node is None:
            yield Term("constant")
            continue
        name, inputs = name_of(node), [next_node for next_node, _ in node.next_functions]
        if name in ("Add", "Sub", "Rsub"):
            found += [(next_node, factors) for next_node in inputs]
        elif name in _PASSED or (name in _RESHAPED and math.prod(node._saved_self_sym_sizes) == 1):
            found.append((inputs[0], factors))
        elif name in ("Mean", "Sum") and _is_stack_of_scalars(inputs[0]):
            summands = inputs[0].next_functions
            if name == "Mean":
                factors = (*factors, (True, float(len(summands))))
            found += [(next_node, factors) for next_node, _ in summands]
        elif name == "Where" and sum(next_node is not None for next_node in inputs) == 1:
            # The other branch is a constant: Keras writes regularizers over no examples so.
            found += [(next_node, factors) for next_node in inputs if next_node is not None]
        elif name in ("Mul", "Div"):
            yield from _term_of_product(node, name == "Div", inputs, factors, found)
        else:
            try:
                term = _term_of_reduction(node, name, inputs)
            except UnknownNode:
                term = Term("unknown", node=node)  # the other terms may be known
            inner = _inner_factors(inputs[0]) if term.kind in ("mean", "sum") else ()
            yield replace(term, factors=(*factors, *inner))


def _term_of_product(
    node: Any, is_div: bool, inputs: list[Any], factors: Any, found: list[Any]
) -> Iterator[Term]:
    if len(inputs) == 1 or inputs[1] is None:
        found.append((inputs[0], (*factors, (is_div, read_saved(node, "other")))))
    elif inputs[0] is None and not is_div:
        found.append((inputs[1], (*factors, (False, read_saved(node, "self")))))
    elif _is_same(inputs[1]):
        found.append((inputs[0], factors))
    elif not is_div and _is_same(inputs[0]):
        found.append((inputs[1], factors))
    else:
        yield Term("a product or quotient of numbers that all come from the batch")


def _is_stack_of_scalars(node: Any) -> bool:
    if name_of(node) not in ("Stack", "Cat"):
        return False
    return arriving_shape(node, 0) == (len(node.next_functions),)


def _inner_factors(node: Any) -> Iterator[tuple[bool, Any]]:
    """Yields the numbers by which the whole reduced tensor is multiplied or divided."""
    for _ in range(_MOST_BELOW):
        name = name_of(node)
        inputs = [next_node for next_node, _ in node.next_functions] if node else []
        graphs = [next_node for next_node in inputs if next_node is not None]
        if len(graphs) != 1 or name not in _LINEAR | {"Sum"}:
            return
        if name in ("Mul", "Div") and (inputs[0] is not None or name == "Mul"):
            other = read_saved(node, "other" if inputs[0] is not None else "self")
            if not isinstance(other, Tensor) or other.dim() == 0:
                yield name == "Div", other
        node = graphs[0]


def _term_of_reduction(node: Any, name: str, inputs: list[Any]) -> Term:
    if name == ACCUMULATES:
        if _is_parameter(node.variable):
            return Term("same")
        raise UnknownNode
    if name in ("Mean", "Sum"):
        return Term(name.lower(), tuple(node._saved_self_sym_sizes), node)
    if name.startswith("NllLoss") and node._saved_reduction == 1:
        return Term("cross entropy", node=node)
    if "Loss" in name or "CrossEntropy" in name:
        reduction = node._saved_reduction
        if reduction in (1, 2) and inputs[0] is not None:
            return Term("mean" if reduction == 1 else "sum", shape_of(node, 0), node)
    elif name in _NONLINEAR:
        if _is_same(node):
            return Term("same")
        return Term(f"what {name.lower()} makes of the part")
    elif name in ("Lerp", "Select") and name_of(inputs[0]) in _ORDERED:
        return Term("one of the part's values in their order")
    elif name == _COLLECTIVE or (is_of_torch(node) and _is_same(node)):
        return Term("same")
    elif _is_function_of_numbers(node):
        return Term(f"what {name.lower()} makes of numbers of the part")
    raise UnknownNode


def _is_function_of_numbers(node: Any) -> bool:
    """Returns whether a node of torch computes a number from numbers that have a graph."""
    if not is_of_torch(node) or name_of(node) in _LINEAR:
        return False
    inputs = [i for i, (next_node, _) in enumerate(node.next_functions) if next_node is not None]
    return bool(inputs) and all(math.prod(shape_of(node, i)) == 1 for i in inputs)


def _is_same(node: Any) -> bool:
    """Returns whether a 0-d value depends on parameters only."""
    return node is not None and is_of_parameters(node, also=_ALSO_OF_PARAMETERS)


def is_of_parameters(node: Any, also: frozenset[str] = frozenset()) -> bool:
    """Returns whether a node's value is computed from parameters, elementwise or by products.

    Results of collectives count as parameters: they are the same on all replicas too.
    """
    if name_of(node) == ACCUMULATES:
        return _is_parameter(node.variable)
    if name_of(node) == _COLLECTIVE:
        return True
    found = [node]
    for seen in range(_MOST_OF_PARAMETERS):
        if not found:
            return True
        below = found.pop()
        name = name_of(below)
        if name == ACCUMULATES:
            if not _is_parameter(below.variable):
                return False
            continue
        if name == _COLLECTIVE:
            continue
        if seen and name not in _ELEMENTWISE | _PRODUCTS | _RESHAPED | _JOINED | also:
            return False
        inputs = [(i, next_node) for i, (next_node, _) in enumerate(below.next_functions)]
        for i, next_node in inputs:
            if next_node is not None:
                found.append(next_node)
                # A result that is larger than this input also depends on something else.
                if len(inputs) > 1 and name in _ELEMENTWISE:
                    if shape_of(below, i) != arriving_shape(below, 0):
                        return False
            elif name in _PRODUCTS or hasattr(below, "_saved_reduction"):
                return False
    return False


def is_parameter_operand(node: Any) -> bool:
    """Returns whether an operand depends on parameters only."""
    return node is not None and name_of(node) in OF_PARAMETERS and is_of_parameters(node)


def _is_parameter(leaf: Tensor) -> bool:
    return isinstance(leaf, (ReplicaParameter, MirroredTensor))


def reaches_parameters(node: Any) -> bool:
    """Returns whether a graph has a gradient for a mirrored parameter."""
    found, seen = [node], {node}
    while found:
        below = found.pop()
        if name_of(below) == ACCUMULATES and _is_parameter(below.variable):
            return True
        for next_node, _ in below.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                found.append(next_node)
    return False


def _walk_below(term: Term) -> Iterator[Any]:
    """Yields the elementwise nodes below a term, and the first other node of each branch."""
    if term.node is None:
        return
    found = [next_node for next_node, _ in term.node.next_functions[:1] if next_node is not None]
    for _ in range(_MOST_BELOW):
        if not found:
            return
        node = found.pop()
        yield node
        if name_of(node) in _ELEMENTWISE | _RESHAPED:
            found += [next_node for next_node, _ in node.next_functions if next_node is not None]


def names_below(term: Term) -> set[str]:
    return {name_of(node) for node in _walk_below(term)}


def views_below(term: Term) -> list[Shape]:
    return [
        tuple(node._saved_self_sym_sizes)
        for node in _walk_below(term)
        if name_of(node) in _RESHAPED
    ]


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
    return list(_mask_sums(term))


def _mask_sums(term: Term) -> Iterator[float]:
    for node in _walk_below(term):
        name = name_of(node)
        for key in ("other", "self") if name == "Mul" else ():
            mask = read_saved(node, key)
            if isinstance(mask, Tensor) and mask.dim() and not mask.requires_grad:
                yield float(mask.sum())
        if name in ("MaskedFill", "Where"):
            mask = read_saved(node, "mask" if name == "MaskedFill" else "condition")
            chosen = float(mask.sum())
            yield from (mask.numel() - chosen, chosen)
        if name in CHOICES:
            yield float(math.prod(term.shape[:1]))
            yield float(math.prod(term.shape))


def read_saved(node: Any, name: str) -> Any:
    """Returns a value that a node has saved.

    Raises:
        UnknownNode: an unpack hook would have to compute the value again.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if getattr(raw, "unpack_hook", None) is not None:
        raise UnknownNode
    return getattr(node, f"_saved_{name}")


def shape_of(node: Any, i: int) -> Shape:
    """Returns the shape of a node's i-th input that has a graph."""
    next_node, number = node.next_functions[i]
    return arriving_shape(next_node, number)


def is_of_torch(node: Any) -> bool:
    """Returns whether a node is one of torch's, not a Python ``autograd.Function``."""
    return type(node).__name__[-1:].isdigit()


def name_of(node: Any) -> str:
    """Returns the name of a node's forward function: "Mul" for ``MulBackward0``."""
    return type(node).__name__.partition("Backward")[0]
