"""The order of the writes at the end of a program, as inductor needs it.

Inductor of torch 2.13 removes clones, even of an input that the program overwrites later. So
``t = a.clone(); a.add_(1); b.copy_(t)`` writes the new value of ``a`` to ``b``; ``torch.compile``
without mirror does so, too. The result is right if ``b`` is written first. If two inputs exchange
their values, there is no such order, and torch's own kernels must run the program.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def order_writes(graph: fx.Graph) -> bool:
    """Moves each write of an input after all writes that may copy the input's old value.

    Returns:
        Whether there is such an order; if not, the graph stays as it is.
    """
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    constants: set[fx.Node] = set()  # the values that depend on no input
    for node in graph.nodes:
        if node.op != "placeholder" and constants.issuperset(node.all_input_nodes):
            constants.add(node)
    sources = {write: _copied_input(write.args[1], constants) for write in writes}
    ordered: list[fx.Node] = []
    waiting = list(writes)
    while waiting:
        readers = Counter(sources[write] for write in waiting if sources[write] != write.args[0])
        ready = [write for write in waiting if not readers[write.args[0]]]
        if not ready:
            return False
        ordered += ready
        waiting = [write for write in waiting if readers[write.args[0]]]
    (output,) = graph.find_nodes(op="output")
    for write in ordered:
        output.prepend(write)
    return True


def _copied_input(value: Any, constants: set[fx.Node]) -> fx.Node | None:
    """Returns the input that a value may be a copy of once inductor has simplified the graph."""
    while value.op != "placeholder":
        before = [node for node in _inputs(value) if node not in constants]
        if len(before) != 1:
            return None
        (value,) = before
    found: fx.Node = value
    return found


def _inputs(node: fx.Node) -> Sequence[fx.Node]:
    """Returns the values that a node is computed from; for an element of a list, only its own."""
    if node.target is torch.ops.aten.copy.default:
        return [node.args[1]]  # type: ignore[list-item]
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node)
    if source is node or "_foreach_" not in str(source.target):
        return source.all_input_nodes
    found: list[Any] = []
    for argument in source.args:
        found.append(argument[node.args[1]] if isinstance(argument, list) else argument)  # type: ignore[index]
    return [one for one in dict.fromkeys(found) if isinstance(one, fx.Node)]
