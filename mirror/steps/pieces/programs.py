"""Programs: the pieces of a step as something to call, made of kernels of torch or compiled."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mirror.steps.pieces.parts import Piece
from mirror.steps.torch_internals import Program, inductor_compiled

Taking = Callable[[Sequence[Any]], Sequence[Any]]

_DRAW = "mirror.draw.default"


class Called:
    """A piece of a step that is ready to be called.

    Attributes:
        call: takes the list of what the piece reads, returns what it gives.
        take: picks what it reads out of a replica's values.
        gives: where what it gives belongs.
        is_raw: whether it writes without a new version of what it writes.
    """

    __slots__ = ("call", "gives", "is_own", "is_raw", "take", "writes")

    def __init__(self, piece: Piece, call: Program, *, is_raw: bool) -> None:
        self.call = call
        self.is_own = piece.is_own
        self.take = taking(piece.reads)
        self.gives = piece.gives
        self.writes = piece.writes
        self.is_raw = is_raw

    def run(self, values: list[Any]) -> None:
        """Runs the piece on a replica's values, and keeps there what it gives."""
        found = self.call(list(self.take(values)))
        for slot, value in zip(self.gives, found, strict=True):
            values[slot] = value


def taking(slots: list[int]) -> Taking:
    """Returns what picks values out of their slots, several of them without Python."""
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    return lambda values: [values[slot] for slot in slots]


def interpreted(piece: Piece) -> Called:
    """Returns a piece that calls torch's kernels one by one, as the step itself does."""
    forward: Any = piece.graph.forward

    def call(inputs: list[Any]) -> Sequence[Any]:
        found: Sequence[Any] = forward(*inputs)
        return found

    return Called(piece, call, is_raw=False)


def compiled(piece: Piece, mode: Any) -> Called:
    """Returns a piece that is compiled: C++ on the CPU, Triton's kernels on GPUs."""
    graph = fx.GraphModule(piece.graph, fx.Graph())
    copied = fx.Graph()
    result = copied.graph_copy(piece.graph.graph, {}, True)
    assert result is not None
    copied.output(result[0] if isinstance(result, tuple) else result)
    graph.graph = copied
    _draw_by_kernel(graph)
    fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    return Called(piece, inductor_compiled(graph, mode, fakes), is_raw=True)


def _draw_by_kernel(graph: fx.GraphModule) -> None:
    """Has what the step draws drawn by inductor, whose kernels fuse it with what uses it."""
    prims = torch.ops.prims
    for node in list(graph.graph.nodes):
        if str(node.target) != _DRAW:
            continue
        size, seed, number, mode = node.args
        with graph.graph.inserting_before(node):
            own = graph.graph.call_function(torch.ops.aten.add.Scalar, (seed, number))
            own.meta["val"] = seed.meta["val"]
            drawn = graph.graph.call_function(prims.inductor_random.default, (size, own, mode))
            drawn.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(drawn)
        graph.graph.erase_node(node)
    graph.recompile()
