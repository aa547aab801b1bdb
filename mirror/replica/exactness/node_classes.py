"""Reads nodes of autograd graphs: how they combine numbers, their shapes, what they depend on.

Each function of torch that the rules of losses and outputs know is in one class:

    class        a number of the result is
    MOVES        one number of the input (or its opposite), in another place perhaps
    VIEWS        the same, with dimensions of size 1 or of equal numbers more or less
    PIECES       the same, of a part of the input; JOINED: of one of several inputs
    ADDS         a sum or difference of one number of each input
    SCALES       a product or quotient of them; linear if one of them is a constant
    MASKS        a number of the input, or a constant
    FUNCTIONS    a function of one number, not linear
    SUMS         a sum or mean of numbers, over all or along dimensions
    STATISTICS   another function of such numbers: not linear
    NORMALIZING  a function of one number and of those along a dimension
    ORDERED      a number whose place or rank along a dimension is another one
    CHOICES      a number that indices or a mask choose
    PRODUCTS     sums of products, or distances, of rows and columns

A walk down from a loss ends at ``LAYERS``: below, the numbers are no longer those of the loss.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from mirror.base.torch_private import ACCUMULATES, arriving_shape
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter

Shape = tuple[int, ...]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _names("Alias Clone Neg Permute T ToCopy Transpose")
VIEWS = _names("Expand ReshapeAlias Squeeze UnsafeView Unsqueeze View")
PIECES = _names("Diagonal Select Slice Split Unbind")
JOINED = _names("Cat Stack")
ADDS = _names("Add Rsub Sub")
SCALES = _names("Div Mul")
MASKS = _names("MaskedFill Where")
FUNCTIONS = _names("Abs Clamp ClampMax ClampMin Exp Log Pow Relu Sigmoid Softplus Sqrt Tanh")
SUMS = _names("Mean Sum")
STATISTICS = _names(
    "Amax Amin Kthvalue LinalgVectorNorm Logsumexp Max Median Min Mode Nanmedian Nansum Norm Prod "
    "Std StdMean Var VarMean"
)
NORMALIZING = _names("Cumprod Cumsum LogSoftmax Logcumsumexp SafeSoftmax Softmax")
ORDERED = _names("Flip Roll Sort Topk")
CHOICES = _names("Index MaskedSelect")
PRODUCTS = _names("Bmm Cdist EuclideanDist Mm")
LAYERS = (  # beginnings of names
    *("Addmm", "Addbmm", "Baddbmm", "Conv", "Cudnn", "Embedding", "Linear", "Mkldnn", "Native"),
    *("Scaled", "Slow", "Thnn", "Upsample"),
)
COLLECTIVE = "GradSend"  # a collective's result, the same on all replicas

ELEMENTWISE = ADDS | SCALES | MASKS | FUNCTIONS | _names("Clone Neg ToCopy")
LINEAR = MOVES | VIEWS | JOINED | ADDS | MASKS | SUMS | {"Slice", "Split"}
_OF_OPERANDS = ELEMENTWISE | MOVES | VIEWS | {"Mm", "Bmm", ACCUMULATES, COLLECTIVE}
_OF_PARAMETERS = _OF_OPERANDS | PIECES | JOINED | SUMS | STATISTICS | {"Dot"}
_MOST_OF_PARAMETERS = 4096  # a penalty may be of all parameters of a model


class UnknownNode(Exception):
    """The nodes do not show how a value was computed."""


# What reading a node raises: of a new torch, of a freed graph, or below saved-tensor hooks.
UNREADABLE = (UnknownNode, AttributeError, RuntimeError, IndexError)


def name_of(node: Any) -> str:
    """Returns the name of a node's forward function: "Mul" for ``MulBackward0``."""
    return type(node).__name__.partition("Backward")[0]


def is_of_torch(node: Any) -> bool:
    """Returns whether a node is one of torch's, not a Python ``autograd.Function``."""
    return type(node).__name__[-1:].isdigit()


def inputs_of(node: Any) -> list[Any]:
    """Returns the nodes of a node's inputs; ``None`` for those without a graph."""
    return [below for below, _ in node.next_functions]


def shape_of(node: Any, i: int) -> Shape:
    """Returns the shape of a node's i-th input that has a graph."""
    below, number = node.next_functions[i]
    return arriving_shape(below, number)


def read_saved(node: Any, name: str) -> Any:
    """Returns a value that a node has saved.

    Raises:
        UnknownNode: an unpack hook would have to compute the value again.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if getattr(raw, "unpack_hook", None) is not None:
        raise UnknownNode
    return getattr(node, f"_saved_{name}")


def walk(
    roots: Iterable[Any], goes_on: Callable[[Any], bool] = lambda node: True
) -> Iterator[Any]:
    """Yields some nodes, and those below each for which ``goes_on`` is true, each once."""
    todo = deque(root for root in roots if root is not None)
    seen = set(todo)
    while todo:
        node = todo.popleft()
        yield node
        if goes_on(node):
            for below, _ in node.next_functions:
                if below is not None and below not in seen:
                    seen.add(below)
                    todo.append(below)


def is_of_parameters(root: Any) -> bool:
    """Returns whether a node's inputs are computed from parameters only.

    Results of collectives count as parameters: they are the same on all replicas too.
    """
    nodes = walk([root], lambda node: name_of(node) != COLLECTIVE)
    for node in itertools.islice(nodes, _MOST_OF_PARAMETERS):
        name = name_of(node)
        if name == ACCUMULATES:
            if not _is_parameter(node.variable):
                return False
            continue
        if name == COLLECTIVE:
            continue
        if node is not root and name not in _OF_PARAMETERS:
            return False
        inputs = inputs_of(node)
        if None in inputs and (name in PRODUCTS or hasattr(node, "_saved_reduction")):
            return False
        # A result that is larger than an input also depends on something else.
        if len(inputs) > 1 and name in ELEMENTWISE:
            shape = arriving_shape(node, 0)
            if any(one is not None and shape_of(node, i) != shape for i, one in enumerate(inputs)):
                return False
    return next(nodes, None) is None


def is_parameter_operand(node: Any) -> bool:
    """Returns whether an operand depends on parameters only."""
    return node is not None and name_of(node) in _OF_OPERANDS and is_of_parameters(node)


def reaches_parameters(root: Any) -> bool:
    """Returns whether a graph has a gradient for a mirrored parameter."""
    return any(name_of(n) == ACCUMULATES and _is_parameter(n.variable) for n in walk([root]))


def _is_parameter(leaf: Tensor) -> bool:
    return isinstance(leaf, (ReplicaParameter, MirroredTensor))
