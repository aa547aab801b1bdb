"""In-place operations: a program of torch's kernels updates its inputs where they are.

A functional graph computes a new value for each input that the step changes, and copies it to the
input at the end. For an optimizer's update that is two passes over the parameters more than the
step itself makes, and memory for a second set of them. An operation may write to its first
argument instead if

- that argument is such an input, or the result of an operation that has written to it;
- nothing reads the input's former value later, not through a view either;
- its result has the input's dtype, sizes and strides, and leaves the program only as the input.

Where the last result is in the input already, the copy at the end is dropped. Inductor does the
same with its own programs, which fuse such operations.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from mirror.compiler.torch_internals import in_place_overload

_AT_THE_END = 1 << 60  # the position of the output and of the copies
_VIEWS_WITHOUT_ALIAS = ("aten._unsafe_view.default",)  # whose schema does not say so


def update_in_place(graph: fx.Graph) -> None:
    """Replaces operations on inputs that the graph overwrites by their in-place variants.

    Args:
        graph: ends with copies to inputs, as those of ``ProgramPiece`` do.
    """
    copies = [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    if any(copy.users for copy in copies):
        return  # it writes before its end
    homes: dict[Any, fx.Node] = {copy.args[0]: copy.args[0] for copy in copies}
    positions = {node: i for i, node in enumerate(graph.nodes)}
    for node in (*copies, *graph.find_nodes(op="output")):
        positions[node] = _AT_THE_END
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default and node.args[0] in homes:
            homes[node] = homes[node.args[0]]
        if _is_needless_clone(node, positions):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        found = None if _is_view(node) else in_place_overload(node.target)
        if found is not None and _may_write(node, homes, positions):
            _replace(graph, node, found, homes, positions)
    for copy in copies:
        if homes.get(copy.args[1]) is copy.args[0]:
            graph.erase_node(copy)


def _is_needless_clone(node: fx.Node, positions: dict[fx.Node, int]) -> bool:
    """Whether a node copies a value, and all read the copy before the end."""
    if node.target is not torch.ops.aten.clone.default or node.kwargs:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    is_kept = any(positions[use] == _AT_THE_END for use in _uses(node))
    return not is_kept and _are_alike(source, node)


def _pairs(node: fx.Node) -> list[tuple[Any, fx.Node | None]]:
    """Returns each input that the in-place variant writes to, with the value it then has."""
    first = node.args[0]
    if not isinstance(first, (list, tuple)):
        return [(first, node)]
    values: list[fx.Node | None] = [None] * len(first)
    for user in node.users:
        if user.target is operator.getitem:
            values[user.args[1]] = user  # type: ignore[index]
    return list(zip(first, values, strict=True))


def _may_write(node: fx.Node, homes: dict[Any, fx.Node], positions: dict[fx.Node, int]) -> bool:
    if not node.args or not node.args[0]:
        return False
    for before, after in _pairs(node):
        home = homes.get(before)
        if home is None or after is None or not _are_alike(home, after):
            return False
        uses = list(_uses(home))
        if uses.count(node) != 1 or _count(node, before) != 1:
            return False  # it reads what it would write in another way, too
        if any(use is not node and positions[use] >= positions[node] for use in uses):
            return False
        at_the_end = [use for use in _uses(after) if positions[use] == _AT_THE_END]
        if any(use.args[0] is not home for use in at_the_end):  # the output, or another copy
            return False
    return True


def _count(node: fx.Node, argument: fx.Node) -> int:
    """Returns how often a node is in the arguments of another one."""
    count = 0

    def visit(one: fx.Node) -> fx.Node:
        nonlocal count
        count += one is argument
        return one

    fx.map_arg((node.args, node.kwargs), visit)
    return count


def _are_alike(home: fx.Node, value: fx.Node) -> bool:
    mine, other = home.meta.get("val"), value.meta.get("val")
    return (
        isinstance(mine, Tensor)
        and isinstance(other, Tensor)
        and mine.dtype == other.dtype
        and mine.shape == other.shape
        and mine.stride() == other.stride()
        and mine.layout is torch.strided
    )


def _uses(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that read a value, itself or through views; not the copies to it."""
    for user in node.users:
        if user.target is torch.ops.aten.copy_.default and user.args[1] is not node:
            continue
        yield user
        if _is_view(user):
            yield from _uses(user)


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.op == "call_function"  # operator.getitem: of a list of views, perhaps
    has_alias = any(result.alias_info is not None for result in schema.returns)
    return has_alias or str(node.target) in _VIEWS_WITHOUT_ALIAS


def _replace(
    graph: fx.Graph,
    node: fx.Node,
    in_place: Any,
    homes: dict[Any, fx.Node],
    positions: dict[fx.Node, int],
) -> None:
    with graph.inserting_before(node):
        written = graph.call_function(in_place, node.args, dict(node.kwargs))
    written.meta["val"] = node.meta.get("val")
    positions[written] = positions[node]
    for before, after in _pairs(node):
        assert after is not None
        after.replace_all_uses_with(before)
        if after is not node:
            graph.erase_node(after)
    graph.erase_node(node)
