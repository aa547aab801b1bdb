"""Finds operations that combine the examples of a part, or compare them, in autograd graphs.

A replica has only the examples of its part, so such an operation does not give what one device's
does. Which dimension has the examples, a graph does not show: a dimension is taken for it by its
size. Where parts differ in size that is certain, else a multiple of the part's examples will do.

    below a term of a loss (``uses_below``, down to the last layers)   it is then
    Mean, Sum over the examples, only linear nodes above               still a mean, or a sum
    any other function along them, a product that contracts them       not linear: it is reported
    a piece of them, Flip, Roll, Sort                                  the same: order matters
    a product, distance or broadcast sum of rows by columns,
    both multiples of the examples (a contrastive loss)                the same: pairs are missing

    below the outputs of forward (``combined_below``, the whole graph)
    any function along the examples, as a softmax or a mean            reported

A loss combines examples by itself. So above its last layer the second search counts only
functions that no mean over examples has, as a softmax over them.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mirror.base.bitwise import have_equal_numbers
from mirror.base.containers import leaves_in
from mirror.base.torch_private import arriving_shape
from mirror.replica.exactness.loss_graph import Term
from mirror.replica.exactness.node_classes import (
    COLLECTIVE,
    JOINED,
    LAYERS,
    LINEAR,
    MOVES,
    NORMALIZING,
    ORDERED,
    PIECES,
    PRODUCTS,
    STATISTICS,
    SUMS,
    UNREADABLE,
    VIEWS,
    Shape,
    inputs_of,
    is_of_parameters,
    is_of_torch,
    is_parameter_operand,
    name_of,
    read_saved,
    shape_of,
    walk,
)
from mirror.threads.user_frames import warn_user

_MOST_BELOW = 96  # nodes below a term
_MOST_NODES = 3000  # of a forward
_ALONG = SUMS | STATISTICS | NORMALIZING | ORDERED
_SHAPING = MOVES | VIEWS | PIECES | JOINED
_TAKING = ("Select", "Slice", "Unbind")
_CHOOSING = ("Gather", "Index", "MaskedSelect", "Scatter")  # beginnings of names
# The names under which products save their operands.
_OPERANDS = {
    "Bmm": ("self", "mat2"),
    "Cdist": ("x1", "x2"),
    "Mm": ("self", "mat2"),
    "Mv": ("self", "vec"),
}
_CONTRACTING = ("Bmm", "Mm", "Mv")

# The words of the warnings, and of `mirror check`.
MIXES_EXAMPLES = (
    "{} computes over the examples of the batch, and a replica has only those of its part"
)

GATHER_FIRST = (
    "compute it outside the model, from the gathered outputs; or gather first inside, with "
    "mirror.get_replica_context().all_gather(value)"
)


@dataclass(frozen=True)
class Use:
    """One node below a term that may combine examples, or compare them.

    Attributes:
        how: the node's name; "Mean" and "Sum" are linear in the examples.
        is_linear: whether the node, and everything above it, is linear.
        size: the size of the dimension that may be the examples; ``None`` if none is combined.
        kept: the size of the next dimension, which may be the examples instead.
        rows: the result's first size; a multiple of the number of examples keeps them all.
        constants: tensors that multiply the values above the node, number by number.
        index: the only index along the dimension that the node takes, if it takes one.
        compared: of comparisons, the numbers of rows and columns, and an operand without a graph.
    """

    how: str
    is_linear: bool = False
    size: int | None = None
    kept: int | None = None
    rows: int | None = None
    constants: tuple[Tensor, ...] = ()
    index: int | None = None
    compared: tuple[int, int, Any] | None = None


def are_of_examples(uses: Sequence[Use], counts: Sequence[float]) -> bool:
    """Returns whether one node, with its uses on all replicas, combines examples."""
    sizes = [use.size or 0 for use in uses]
    if all(use.rows and use.rows % c == 0 for use, c in zip(uses, counts, strict=True)):
        return False
    if len(set(counts)) > 1 or len(set(sizes)) > 1:
        return len(set(sizes)) > 1
    if uses[0].how in _CONTRACTING and counts[0] == 1:
        return sizes[0] == 1
    return uses[0].kept != counts[0] and sizes[0] > 0 and sizes[0] % counts[0] == 0


def are_linear(uses: Sequence[Use]) -> bool:
    """Returns whether one node, with its uses on all replicas, is linear in the examples."""
    first = uses[0].constants
    return all(
        use.is_linear and use.how in SUMS and len(use.constants) == len(first) for use in uses
    ) and all(map(_are_equal, zip(*(use.constants for use in uses), strict=True)))


def are_comparisons(uses: Sequence[Use], counts: Sequence[float]) -> bool:
    """Returns whether one node compares every example of a part with every other one.

    A contrastive loss (CLIP's, SimCLR's) does. A replica computes the comparisons within its part
    only, and no weights make up for those between parts. A matrix without a graph (of a frozen
    encoder) holds examples if the parts differ in size, or if the matrix differs between
    replicas; else it may be a table of constants.
    """
    found = [use.compared for use in uses if use.compared]
    if max(counts) <= 1 or len(found) < len(uses):
        return False
    rows, columns, constants = zip(*found, strict=True)
    for sizes in (rows, columns):
        multiple = sizes[0] / counts[0]
        if multiple < 1 or any(s != multiple * c for s, c in zip(sizes, counts, strict=True)):
            return False
    return len(set(counts)) > 1 or constants[0] is None or not _are_equal(constants)


def _are_equal(tensors: Sequence[Tensor]) -> bool:
    return all(have_equal_numbers(tensor, tensors[0]) for tensor in tensors)


def uses_below(term: Term) -> list[Use]:
    """Returns the nodes below a term that may combine or compare examples."""
    if term.node is None:
        return []
    found: list[Use] = []
    # A node, which of its results; whether all nodes above are uses, or of each number; whether
    # these are linear, and the constants that they multiply by.
    todo = deque[tuple[Any, int, bool, bool, tuple[Tensor, ...]]]()
    is_linear = name_of(term.node) in SUMS
    todo += ((n, i, True, is_linear, ()) for n, i in term.node.next_functions if n)
    seen = set[Any]()
    while todo and len(seen) < _MOST_BELOW:
        node, number, is_near, linear, constants = todo.popleft()
        key, name = (node, is_near, linear, constants), name_of(node)
        # What was written in place is one of torch's, too.
        if key in seen or name.startswith(LAYERS):
            continue
        if not is_of_torch(node) and name != "CopySlices":
            continue
        seen.add(key)
        is_near = is_near and is_of_torch(node) and not name.startswith(_CHOOSING)
        if name in PRODUCTS or name in ("Mv", "Pdist"):
            if not any(map(is_parameter_operand, inputs_of(node))):
                found.append(_use_of_product(node, name, is_near))
            if name != "Mv":
                continue
            is_near = False
        elif name in ("Add", "Mul", "Sub") and _are_rows_and_columns(node):
            rows, columns = arriving_shape(node, 0)[:2]
            found.append(Use(name, compared=(rows, columns, None)))
        if is_near:
            linear, constants = _linearity(node, name, linear, constants)
            use = _use_along_first(node, name, number, linear, constants)
            if use is not None and not is_of_parameters(node):
                found.append(use)
            is_near = use is not None or _is_of_each_number(node)
        if not is_near:
            linear, constants = False, ()
        todo += ((n, i, is_near, linear, constants) for n, i in node.next_functions if n)
    return found


def _use_along_first(
    node: Any, name: str, number: int, linear: bool, constants: tuple[Tensor, ...]
) -> Use | None:
    """Returns a node's use of the first dimension of its input, if it combines that one."""
    shape, dims = _combined_dims(node, name)
    if 0 not in dims:
        return None
    reduction = getattr(node, "_saved_reduction", 0)
    how = ("Mean", "Sum")[reduction - 1] if reduction in (1, 2) else name
    kept = shape[1] if len(shape) > 2 and len(dims) < len(shape) else None
    rows = arriving_shape(node, 0)[0] if name == "Slice" else None
    index = {"Select": getattr(node, "_saved_index", 0), "Unbind": number}.get(name)
    if name == "Slice" and rows == 1:
        index = node._saved_start
    if index is not None:
        index = _signed(index) % shape[0]
    return Use(how, linear, shape[0], kept, rows, constants, index)


def _combined_dims(node: Any, name: str) -> tuple[Shape, list[int]]:
    """Returns the shape of a node's input, and the dimensions along which it combines numbers."""
    graphs = [i for i, below in enumerate(inputs_of(node)) if below is not None]
    shape = shape_of(node, graphs[0]) if graphs else ()
    if not shape or (name in _SHAPING and name not in _TAKING):
        return shape, []
    if not arriving_shape(node, 0) and math.prod(shape) > 1:  # over all numbers
        return shape, list(range(len(shape)))
    dims = getattr(node, "_saved_dims" if name in ("Flip", "Roll") else "_saved_dim", None)
    if dims is None:
        return shape, [0, 1] if name.startswith("Linalg") and len(shape) == 2 else []
    listed = dims if isinstance(dims, tuple) else (dims,)
    return shape, [_signed(dim) % len(shape) for dim in listed]


def _use_of_product(node: Any, name: str, is_near: bool) -> Use:
    """Returns the use by a product or distance: what it contracts, and what it compares."""
    if name == "Pdist":
        rows = shape_of(node, 0)[0]
        return Use(name, compared=(rows, rows, None))
    output, operands = arriving_shape(node, 0), inputs_of(node)
    size = kept_rows = None
    compared: tuple[int, int, Any] | None = None
    if is_near and name in _CONTRACTING and (name != "Bmm" or output[0] == 1):
        kept_rows, size = _shape_of_left(node, name)[-2:]
        if operands[0] is not None and _is_transposed(operands[0]):
            kept_rows = None
    if name != "Mv" and all(n == 1 for n in output[:-2]):
        if None not in operands:
            compared = output[-2], output[-1], None
        elif name in _OPERANDS:
            constant = read_saved(node, _OPERANDS[name][operands.index(None)])
            compared = output[-2], output[-1], constant
    return Use(name, size=size, rows=kept_rows, compared=compared)


def _shape_of_left(node: Any, name: str) -> Shape:
    if node.next_functions[0][0] is not None:
        return shape_of(node, 0)
    return tuple(read_saved(node, _OPERANDS[name][0]).shape)


def _is_transposed(node: Any) -> bool:
    """Returns whether a matrix is a transposed one, its columns the first dimension before."""
    for below in itertools.islice(walk([node], _is_of_each_number), 8):
        name = name_of(below)
        if name == "Permute":
            return bool(below._saved_dims[-1] == 0)
        if name in ("T", "Transpose"):
            return name == "T" or 0 in (below._saved_dim0, below._saved_dim1)
    return False


def _is_of_each_number(node: Any) -> bool:
    """Returns whether each number of a node's output depends on one number of each input.

    A function along a dimension counts too; one along the first dimension is a use of it.
    """
    name = name_of(node)
    if name.startswith((*LAYERS, *_CHOOSING)):
        return False
    if name in _SHAPING or getattr(node, "_saved_dim", None) is not None:
        return True
    shape = arriving_shape(node, 0)
    return all(
        below is None or _fits(shape_of(node, i), shape) for i, below in enumerate(inputs_of(node))
    )


def _fits(some: Shape, shape: Shape) -> bool:
    """Returns whether a shape broadcasts to another one."""
    pairs = zip(reversed(some), reversed(shape), strict=False)
    return len(some) <= len(shape) and all(a in (1, b) for a, b in pairs)


def _linearity(node: Any, name: str, linear: bool, constants: Any) -> tuple[bool, Any]:
    if not linear or name in LINEAR or getattr(node, "_saved_reduction", 0) in (1, 2):
        return linear, constants
    inputs = inputs_of(node)
    if name not in ("Mul", "Div") or (name == "Div" and inputs[0] is None):
        return False, constants
    if None not in inputs:
        if len(inputs) == 1 or is_parameter_operand(inputs[1]):
            return True, constants
        return name == "Mul" and is_parameter_operand(inputs[0]), constants
    other = read_saved(node, "self" if inputs[0] is None else "other")
    if isinstance(other, Tensor) and other.dim():
        return True, (*constants, other)
    return True, constants


def _signed(dim: int) -> int:
    return dim - 2**64 if dim >= 2**63 else dim


def _are_rows_and_columns(node: Any) -> bool:
    """Returns whether a node's inputs broadcast to each other along their first dimensions."""
    operands = inputs_of(node)
    if len(operands) != 2 or None in operands or any(map(is_parameter_operand, operands)):
        return False
    first, second = _shape_before_expand(node, 0)[:2], _shape_before_expand(node, 1)[:2]
    return len(first) == len(second) == 2 and (
        (first[1] == second[0] == 1) or (first[0] == second[1] == 1)
    )


def _shape_before_expand(node: Any, i: int) -> Shape:
    """Returns the shape of an operand; of one that was expanded, the shape before."""
    shape, below = shape_of(node, i), inputs_of(node)[i]
    for _ in range(4):  # a cosine divides by the norm
        if name_of(below) == "Expand":
            return shape_of(below, 0)
        if name_of(below) not in ("Clone", "Div", "ToCopy") or inputs_of(below)[0] is None:
            break
        below = inputs_of(below)[0]
    return shape


Combined = tuple[str, list[int]]
"""An operation, and the sizes of the dimensions along which it combines numbers."""


def warn_if_mixing(module: nn.Module, results: Mapping[int, Any], sizes: Sequence[float]) -> bool:
    """Warns if the outputs of a split call combine the examples of a part.

    Args:
        results: the outputs of the replicas that ran, by replica.
        sizes: all replicas' numbers of examples.

    Returns:
        Whether the outputs have graphs, and the parts that ran differ in size.
    """
    counts = [sizes[r] for r in results]
    roots = [_rows_of(out, count) for out, count in zip(results.values(), counts, strict=True)]
    if not all(roots) or len(set(counts)) < 2:
        return False
    name = mixing_operation([combined_below(nodes) for nodes in roots], counts)
    if name is not None:
        warn_of_mixing(f"{name} in the forward of {type(module).__name__}")
    return True


def _rows_of(output: Any, count: float) -> list[Any]:
    """Returns the nodes of the tensors in an output that have a row for each example."""
    return [
        leaf.grad_fn
        for leaf in leaves_in(output)
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None and leaf.shape[:1] == (count,)
    ]


def warn_of_mixing(what: str) -> None:
    """Warns of an operation that combines the examples of a part."""
    text = MIXES_EXAMPLES.format(what)
    warn_user(f"{text}, so the result differs from one device's; {GATHER_FIRST}")


def mixing_operation(found: Sequence[Sequence[Combined]], counts: Sequence[float]) -> str | None:
    """Returns the name of an operation that combines examples; ``None`` if the graphs show none.

    Args:
        found: what ``combined_below`` returns for each replica.
        counts: the replicas' numbers of examples, which differ.
    """
    for of_node in zip(*found, strict=False):
        if len({name for name, _ in of_node}) > 1:
            return None  # the replicas' graphs differ from here on
        for sizes in zip(*(sizes for _, sizes in of_node), strict=False):
            # Empty dimensions are in proportion to any counts.
            pairs = zip(sizes, counts, strict=True)
            if sizes[0] and all(s * counts[0] == sizes[0] * c for s, c in pairs):
                return str(of_node[0][0]).lower()
    return None


def combined_below(roots: Sequence[Any], *, of_loss: bool = False) -> list[Combined]:
    """Returns the operations below some nodes that combine numbers along dimensions.

    Args:
        of_loss: whether the nodes compute a loss; see the module's docstring.
    """
    found: list[Combined] = []
    todo, seen = deque((root, not of_loss) for root in roots), set(roots)
    while todo and len(seen) < _MOST_NODES:
        node, is_inside = todo.popleft()
        name = name_of(node)
        if name == COLLECTIVE:
            continue
        if is_inside or name in NORMALIZING:
            try:
                found.append((name, _combined_sizes(node, name)))
            except UNREADABLE:
                found.append((name, []))
        is_inside = is_inside or name.startswith(LAYERS)
        for below in inputs_of(node):
            if below is not None and below not in seen:
                seen.add(below)
                todo.append((below, is_inside))
    return found


def _combined_sizes(node: Any, name: str) -> list[int]:
    """Returns the sizes of the dimensions along which a node combines numbers."""
    if name in PRODUCTS:
        # What a product of matrices sums over, and its rows if it has as many columns.
        if any(map(is_parameter_operand, inputs_of(node))):
            return []
        rows, columns = arriving_shape(node, 0)[-2:]
        contracted = [_shape_of_left(node, name)[-1]] if name in _CONTRACTING else []
        return [rows, *contracted] if rows == columns else contracted
    if name not in _ALONG:
        return []
    shape, dims = _combined_dims(node, name)
    return [shape[dim] for dim in dims]
