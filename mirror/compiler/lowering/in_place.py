"""In-place operations: a program of torch's kernels updates its inputs where they are.

A functional graph computes a new value for each input that the step changes, and copies it to the
input at the end. For an optimizer's update, the copies read the new parameters and write them a
second time, and the new values need memory of their own. An operation may write to its first
argument instead if

- the argument is an input that the step changes, or a value already written to that input;
- nothing reads the input's old value afterwards, directly or through a view;
- the result has the input's dtype, sizes and strides, and leaves the program only as that input.

If an input already holds its final value, its copy at the end is dropped. Inductor does the same
in the programs that it compiles.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from mirror.compiler.capture.functional_graph import is_view
from mirror.compiler.overloads import in_place_overload
from mirror.compiler.torch_internals import without_guards

_AT_THE_END = 1 << 60  # the position of the output and of the copies
_VIEWS_WITHOUT_ALIAS = ("aten._unsafe_view.default",)  # views, but not by their schema


def update_in_place(graph: fx.Graph) -> None:
    """Replaces operations on the inputs that the graph changes by their in-place variants.

    Args:
        graph: a graph that ends with copies to inputs, as in ``ProgramPiece``.
    """
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    if any(copy.users for copy in copies):
        return  # an input is written in the middle of the graph
    # Maps each input that changes, and its detached views, to the input. These nodes also replace
    # the results that are written to it.
    stored_in: dict[Any, fx.Node] = {copy.args[0]: copy.args[0] for copy in copies}
    positions = {node: i for i, node in enumerate(graph.nodes)}
    for node in (*copies, *graph.find_nodes(op="output")):
        positions[node] = _AT_THE_END
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default and node.args[0] in stored_in:
            stored_in[node] = stored_in[node.args[0]]
        if _is_needless_clone(node, positions):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        found = None if is_view(node) else in_place_overload(node.target)
        if found is not None and _may_write(node, stored_in, positions):
            _replace(graph, node, found, stored_in, positions)
    for copy in copies:
        if stored_in.get(copy.args[1]) is copy.args[0]:
            graph.erase_node(copy)


def _is_needless_clone(node: fx.Node, positions: dict[fx.Node, int]) -> bool:
    """Whether a node clones a value, and the clone is neither returned nor copied to an input."""
    if node.target is not torch.ops.aten.clone.default or node.kwargs:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    is_kept = any(positions[use] == _AT_THE_END for use in _uses(node))
    return not is_kept and _have_same_layout(source, node)


def _pairs(node: fx.Node) -> list[tuple[Any, fx.Node | None]]:
    """Returns each argument that the in-place variant writes, with its new value or ``None``.

    ``None``: nothing uses that element of a list operation.
    """
    first = node.args[0]
    if not isinstance(first, (list, tuple)):
        return [(first, node)]
    values: list[fx.Node | None] = [None] * len(first)
    for user in node.users:
        if user.target is operator.getitem:
            values[user.args[1]] = user  # type: ignore[index]
    return list(zip(first, values, strict=True))


def _may_write(
    node: fx.Node, stored_in: dict[Any, fx.Node], positions: dict[fx.Node, int]
) -> bool:
    if not node.args or not node.args[0]:
        return False
    num_uses = Counter[fx.Node]()
    fx.map_arg((node.args, node.kwargs), lambda one: num_uses.update((one,)))
    for before, after in _pairs(node):
        holder = stored_in.get(before)
        if holder is None or after is None or not _have_same_layout(holder, after):
            return False
        uses = list(_uses(holder))
        if uses.count(node) != 1 or num_uses[before] != 1:
            return False  # the operation reads the input a second time, perhaps through a view
        if any(use is not node and positions[use] >= positions[node] for use in uses):
            return False
        at_the_end = [use for use in _uses(after) if positions[use] == _AT_THE_END]
        if any(use.args[0] is not holder for use in at_the_end):  # the output, or another input
            return False
    return True


def _have_same_layout(one: fx.Node, two: fx.Node) -> bool:
    """Whether both values are strided, and agree in dtype, sizes and strides.

    For all batch sizes, not only for that of the trace: to compare the sizes themselves would make
    a batch of 6 beside 6 features a trace of its own.
    """
    value, other = one.meta.get("val"), two.meta.get("val")
    return (
        isinstance(value, Tensor)
        and isinstance(other, Tensor)
        and value.dtype == other.dtype
        and value.layout is torch.strided
        and without_guards(value.shape) == without_guards(other.shape)
        and without_guards(value.stride()) == without_guards(other.stride())
    )


def _uses(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that read a value, directly or through views, but no copy to it."""
    for user in node.users:
        if user.target is torch.ops.aten.copy_.default and user.args[1] is not node:
            continue
        yield user
        if is_view(user) or str(user.target) in _VIEWS_WITHOUT_ALIAS:
            yield from _uses(user)


def _replace(
    graph: fx.Graph,
    node: fx.Node,
    in_place: Any,
    stored_in: dict[Any, fx.Node],
    positions: dict[fx.Node, int],
) -> None:
    with graph.inserting_before(node):
        written = graph.call_function(in_place, node.args, dict(node.kwargs))
        written.meta = dict(node.meta)
    positions[written] = positions[node]
    for before, after in _pairs(node):
        assert after is not None
        after.replace_all_uses_with(before)
        if after is not node:
            graph.erase_node(after)
    graph.erase_node(node)
