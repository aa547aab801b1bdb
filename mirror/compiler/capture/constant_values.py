"""Values that a trace knows: of tensors that no input leads to, such as masks of positions.

A trace has no values, so it refuses code that asks a tensor for its value. But what is made of
``torch.arange`` and the like, and of nothing else, has the same value in every call with the sizes
of the trace. Its nodes of the graph are run once more, on the trace's device.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from mirror.compiler.capture.functional_graph import base_of_view
from mirror.compiler.torch_internals import (
    is_operation,
    node_of,
    run_untraced,
    schema_of,
)


def known_value(tensor: Any) -> Tensor | None:
    """Returns the value of a traced tensor; ``None`` if it may differ between calls."""
    node = node_of(tensor) if isinstance(tensor, Tensor) else None
    if node is None:
        return None
    made: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        one = pending.pop()
        if one not in made:
            if not _has_one_value(one):
                return None
            made[one] = None
            pending += one.all_input_nodes
    bases = set(map(base_of_view, made))
    if any(_writes(one, bases) for one in node.graph.nodes):
        return None
    values: dict[fx.Node, Any] = {}

    def run() -> Any:
        for one in node.graph.nodes:
            if one in made:
                args, kwargs = fx.map_arg((one.args, one.kwargs), values.__getitem__)
                values[one] = one.target(*args, **kwargs)
        return values[node]

    found: Tensor = run_untraced(run)
    return found


def _has_one_value(node: fx.Node) -> bool:
    target: Any = node.target
    if not is_operation(target):
        return target is operator.getitem  # one of several results
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return not (schema_of(target).is_mutable or is_random)


def _writes(node: fx.Node, bases: set[fx.Node]) -> bool:
    """Whether an operation may write to one of these tensors."""
    if not is_operation(node.target) or not schema_of(node.target).is_mutable:
        return False
    return any(base_of_view(one) in bases for one in node.all_input_nodes)
