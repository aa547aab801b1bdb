"""Nodes of autograd graphs: the table of their classes, their shapes, what they depend on.

    class        a number of the result is
    MOVES        one number of the input (or its opposite), in another place perhaps
    VIEWS        the same, with dimensions of size 1 or of equal numbers more or less
    PIECES       the same, of a piece of the input; JOINED: of one of several inputs
    CHOICES      one that indices or a mask choose
    FOLDS        a sum or an extreme of those that indices send there
    ADDS         a sum or difference of one number of each input
    SCALES       a product or quotient of them
    MASKS        a number of an input, or a constant
    SUMS         a sum or mean of numbers, over all or along dimensions
    PRODUCTS     sums of products, or distances, of rows and columns
    SOLVES       the solution of a linear system
    LAYERS       what a layer computes of each example

Any other function is known by what its node saves (``reduction``, ``dim``) and by its shapes.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mirror.base.torch_private import ACCUMULATES, arriving_shape
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter

Shape = tuple[int, ...]

MOVES = ("Alias", "Clone", "Neg", "Permute", "T", "ToCopy", "Transpose")
VIEWS = ("Expand", "ReshapeAlias", "Squeeze", "UnsafeView", "Unsqueeze", "View")
PIECES = ("Diagonal", "Select", "Slice", "Split", "SplitWithSizes", "Unbind")
JOINED = ("Cat", "Stack")
CHOICES = ("Gather", "Index", "IndexSelect", "MaskedSelect", "Scatter")
FOLDS = ("IndexAdd", "IndexReduce", "ScatterAdd", "ScatterReduce")
ADDS = ("Add", "Rsub", "Sub")
SCALES = ("Div", "Mul")
MASKS = ("MaskedFill", "Where")
SUMS = ("Mean", "Sum")
PRODUCTS = ("Bmm", "Cdist", "Dot", "EuclideanDist", "Mm", "Mv")
SOLVES = ("LinalgSolveEx", "LinalgSolveTriangular")
LAYERS = (  # beginnings of names
    *("Addmm", "Addbmm", "Baddbmm", "Conv", "Cudnn", "Embedding", "Linear", "Mkldnn", "Native"),
    *("Scaled", "Slow", "Thnn", "Upsample"),
)
COLLECTIVE = "GradSend"  # a collective's result, the same on all replicas
STANDS_FOR_PARAMETER = "_mirror_stands_for_parameter"  # an attribute of leaves in a trace

_MOST_OF_PARAMETERS = 4096  # nodes of an operand that may be of all parameters of a model


class UnknownNode(Exception):
    """The nodes do not show how a value was computed."""


# What reading a node raises: of a new torch, of a freed graph, or below saved-tensor hooks.
UNREADABLE = (UnknownNode, AttributeError, RuntimeError, IndexError)


def name_of(node: Any) -> str:
    """Returns the name of a node's forward function: "Mul" for ``MulBackward0``."""
    return type(node).__name__.partition("Backward")[0]


def read_saved(node: Any, name: str) -> Any:
    """Returns a value that a node has saved.

    Raises:
        UnknownNode: an unpack hook would have to compute the value again.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if getattr(raw, "unpack_hook", None) is not None:
        raise UnknownNode
    return getattr(node, f"_saved_{name}")


def signed(dim: int) -> int:
    """Returns a dimension or index that a node has saved as an unsigned number."""
    return dim - 2**64 if dim >= 2**63 else dim


def combined_dims(node: Any, name: str, before: Shape, after: Shape) -> list[int]:
    """Returns the dimensions of a node's input along which it combines numbers.

    Args:
        before, after: the shapes of the input, and of the result.
    """
    if not after and math.prod(before) != 1:  # over all numbers
        return [*range(len(before))]
    dims = getattr(node, "_saved_dims" if name in ("Flip", "Roll") else "_saved_dim", None)
    if dims is None:
        is_of_matrices = name.startswith("Linalg") and len(before) > 1
        return [len(before) - 2, len(before) - 1] if is_of_matrices else []
    listed = dims if isinstance(dims, tuple) else (dims,)
    return [signed(dim) % len(before) for dim in listed or range(len(before)) if before]


def walk(roots: Iterable[Any], goes_on: Callable[[Any], bool]) -> Iterator[Any]:
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


def is_of_layer(node: Any, name: str) -> bool:
    """Returns whether a node is a layer's: a product with parameters, or none of torch's, too."""
    if name.startswith(LAYERS) or not (type(node).__name__[-1:].isdigit() or name == "CopySlices"):
        return True
    if name not in PRODUCTS:
        return False
    of_parameters = [_is_of_parameters(below) for below, _ in node.next_functions]
    return any(of_parameters) and not all(of_parameters)


def _is_of_parameters(root: Any) -> bool:
    """Returns whether an operand depends on parameters only.

    Results of collectives count as parameters: they are the same on all replicas too.
    """
    ends = (COLLECTIVE, ACCUMULATES)
    nodes = walk([root], lambda node: name_of(node) not in ends)
    for node in itertools.islice(nodes, _MOST_OF_PARAMETERS):
        name = name_of(node)
        if name == ACCUMULATES:
            if not is_parameter(node):
                return False
        elif name != COLLECTIVE and depends_on_more(node, name):
            return False
    return root is not None and next(nodes, None) is None


def depends_on_more(node: Any, name: str) -> bool:
    """Returns whether a node over parameters depends on a tensor of the batch as well."""
    inputs = node.next_functions
    if name in CHOICES or name.startswith("Embedding"):
        return True
    without_graph = any(below is None for below, _ in inputs)
    is_of_data = name in PRODUCTS or name.startswith(LAYERS) or hasattr(node, "_saved_reduction")
    if without_graph and is_of_data:
        return True
    # A result that is larger than an input shows another input.
    is_of_numbers = without_graph and name in ADDS + SCALES + MASKS
    return is_of_numbers and arriving_shape(node, 0) not in [
        arriving_shape(below, i) for below, i in inputs if below is not None
    ]


def is_parameter(node: Any) -> bool:
    """Returns whether a node accumulates the gradient of a mirrored parameter."""
    return name_of(node) == ACCUMULATES and (
        isinstance(node.variable, (ReplicaParameter, MirroredTensor))
        or hasattr(node.variable, STANDS_FOR_PARAMETER)
    )
