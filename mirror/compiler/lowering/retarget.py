"""Placing: a piece, traced on one device, for another one.

[Note: One trace, many devices]
A step is traced once, on the first replica's device, and what it makes there of nothing (zeros, a
mask, a range) names that device; so do its copies to it. On every other device the graph is the
same but for that name. What the step keeps on the host stays there.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx

from mirror.compiler.torch_internals import traced


def retarget(
    graph: fx.GraphModule, traced_on: torch.device, device: torch.device
) -> fx.GraphModule:
    """Returns a piece that makes on ``device`` what the trace made on ``traced_on``."""
    if device == traced_on:
        return graph
    own = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in own.graph.nodes:
        if node.op == "call_function":
            node.args = _move_constant(node.args, traced_on, device)
            node.kwargs = _move_constant(node.kwargs, traced_on, device)
    own.recompile()
    return own


def retarget_again(
    graph: fx.GraphModule, mode: Any, traced_on: torch.device, device: torch.device
) -> fx.GraphModule:
    """Returns the same, with what is known of every value: a compiler asks where it is."""
    if device == traced_on:
        return graph
    fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with mode:
        there = [
            fake.to(device) if isinstance(fake, Tensor) and fake.device == traced_on else fake
            for fake in fakes
        ]
    own = retarget(graph, traced_on, device)

    def function(*inputs: Any) -> Any:
        return own(*inputs)

    return traced(function, mode, there)


def _move_constant(arguments: Any, before: torch.device, after: torch.device) -> Any:
    if isinstance(arguments, torch.device):
        is_named = arguments.type == before.type and arguments.index in (None, before.index)
        return after if is_named else arguments
    if isinstance(arguments, dict):
        return {name: _move_constant(value, before, after) for name, value in arguments.items()}
    if isinstance(arguments, (list, tuple)):
        return type(arguments)([_move_constant(value, before, after) for value in arguments])
    return arguments
