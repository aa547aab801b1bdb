"""Finds operations that combine the examples of a batch, in the graphs of outputs and losses.

A softmax or a flip over the batch, or ``x - x.mean(0)``, gives every example a value that depends
on the others. A replica has only the examples of its part, so its result differs from one
device's.

Where the parts of a batch differ in size, a dimension that differs between the replicas in
the same way is that of the examples; nothing else in a graph shows that for certain. So a module
is checked at its first split call with uneven parts, and a loss in ``run`` likewise.

A loss combines examples by itself. So above its last layer only functions count that no mean
over examples has, as a softmax over them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mirror.base.torch_private import arriving_shape
from mirror.replica.exactness.batch_dim_rules import signed_dim
from mirror.replica.exactness.loss_graph import (
    Shape,
    UnknownNode,
    is_parameter_operand,
    name_of,
    read_saved,
    shape_of,
)
from mirror.replica.scatter_gather.containers import leaves_in
from mirror.threads.user_frames import warn_user

Use = tuple[str, list[int]]
"""An operation, and the sizes of the dimensions along which it combines numbers."""


_MOST_NODES = 3000
_NORMALIZING = frozenset("Cumprod Cumsum LogSoftmax Logcumsumexp SafeSoftmax Softmax".split())

_ALONG = _NORMALIZING | frozenset(
    "Amax Amin Flip LinalgVectorNorm Logsumexp Max Mean Median Min Mode Nansum Norm Prod Roll "
    "Sort Std StdMean Sum Topk Var VarMean".split()
)

_PRODUCTS = frozenset("Bmm Cdist EuclideanDist Mm".split())
_LAYERS = ("Addmm", "Conv", "Cudnn", "Embedding", "Linear", "Mkldnn", "Native", "Thnn")
_COLLECTIVE = "GradSend"  # it returns values of all replicas


# The words of the warnings, and of `mirror check`.
MIXES_EXAMPLES = (
    "{} computes over the examples of the batch, and a replica has only those of its part"
)

GATHER_FIRST = (
    "compute it outside the model, from the gathered outputs; or gather first inside, with "
    "mirror.get_replica_context().all_gather(value)"
)


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
    name = mixing_operation([uses_below(nodes) for nodes in roots], counts)
    if name is not None:
        warn_of_mixing(f"{name} in the forward of {type(module).__name__}")
    return True


def warn_of_mixing(what: str) -> None:
    """Warns of an operation that combines the examples of a part."""
    text = MIXES_EXAMPLES.format(what)
    warn_user(f"{text}, so the result differs from one device's; {GATHER_FIRST}")


def mixing_operation(uses: Sequence[Sequence[Use]], counts: Sequence[float]) -> str | None:
    """Returns the name of an operation that combines examples; ``None`` if the graphs show none.

    Args:
        uses: what ``uses_below`` returns for each replica.
        counts: the replicas' numbers of examples, which differ.
    """
    for of_node in zip(*uses, strict=False):
        if len({name for name, _ in of_node}) > 1:
            return None  # the replicas' graphs differ from here on
        for sizes in zip(*(sizes for _, sizes in of_node), strict=False):
            # Empty dimensions are in proportion to any counts.
            pairs = zip(sizes, counts, strict=True)
            if sizes[0] and all(s * counts[0] == sizes[0] * c for s, c in pairs):
                return str(of_node[0][0]).lower()
    return None


def uses_below(roots: Sequence[Any], *, of_loss: bool = False) -> list[Use]:
    """Returns the operations below some nodes that combine numbers along dimensions.

    Args:
        of_loss: whether the nodes compute a loss; see the module's docstring.
    """
    return list(_uses_below(roots, not of_loss))


def _rows_of(output: Any, count: float) -> list[Any]:
    """Returns the nodes of the tensors in an output that have a row for each example."""
    return [
        leaf.grad_fn
        for leaf in leaves_in(output)
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None and leaf.shape[:1] == (count,)
    ]


def _uses_below(roots: Sequence[Any], is_in_forward: bool) -> Iterator[Use]:
    todo, seen = deque((root, is_in_forward) for root in roots), set(roots)
    while todo and len(seen) < _MOST_NODES:
        node, is_inside = todo.popleft()
        name = name_of(node)
        if name == _COLLECTIVE:
            continue
        if is_inside or name in _NORMALIZING:
            try:
                yield name, _combined_sizes(node, name)
            except (UnknownNode, AttributeError, RuntimeError, IndexError):  # new torch, or a hook
                yield name, []
        is_inside = is_inside or name.startswith(_LAYERS)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append((below, is_inside))


def _combined_sizes(node: Any, name: str) -> list[int]:
    """Returns the sizes of the dimensions along which a node combines numbers."""
    if name in _PRODUCTS:
        return _sizes_of_product(node, name)
    if name not in _ALONG:
        return []
    shape = _input_shape(node)
    dims = getattr(node, "_saved_dims" if name in ("Flip", "Roll") else "_saved_dim", None)
    if dims is None or dims == ():  # over all numbers
        return list(shape) if arriving_shape(node, 0) == () else []
    listed = dims if isinstance(dims, tuple) else (dims,)
    return [shape[signed_dim(dim)] for dim in listed]


def _sizes_of_product(node: Any, name: str) -> list[int]:
    """Returns what a product of matrices sums over, and its rows if it has as many columns."""
    operands = [below for below, _ in node.next_functions]
    if any(is_parameter_operand(operand) for operand in operands):
        return []
    rows, columns = arriving_shape(node, 0)[-2:]
    sizes = [rows] if rows == columns else []
    if name in ("Mm", "Bmm"):
        left = shape_of(node, 0) if operands[0] is not None else read_saved(node, "self").shape
        sizes.append(left[-1])
    return sizes


def _input_shape(node: Any) -> Shape:
    with_graph = (i for i, (below, _) in enumerate(node.next_functions) if below is not None)
    return shape_of(node, next(with_graph, 0))
