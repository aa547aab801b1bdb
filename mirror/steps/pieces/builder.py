"""Builder: makes the graph of one program out of nodes of a step's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx


class Builder:
    """Makes the graph of one program.

    Args:
        module: that of the whole step.
        slot_of: of a value that the program takes, where it finds it.

    Attributes:
        reads: slots of what it takes.
    """

    def __init__(self, module: fx.GraphModule, slot_of: Callable[[fx.Node], int]) -> None:
        self._module, self._slot_of = module, slot_of
        self._graph, self._made = fx.Graph(), dict[fx.Node, fx.Node]()
        self.reads: list[int] = []

    def read(self, node: fx.Node) -> fx.Node:
        """Returns what stands for a value that the program takes."""
        if node not in self._made:
            holder = self._made[node] = self._graph.placeholder(f"in_{len(self.reads)}")
            holder.meta = dict(node.meta)
            self.reads.append(self._slot_of(node))
        return self._made[node]

    def build(
        self,
        body: Sequence[fx.Node],
        given: Sequence[fx.Node],
        old: Sequence[fx.Node],
        writes: Mapping[fx.Node, fx.Node],
    ) -> fx.GraphModule:
        """Returns the program.

        Args:
            body: what it computes, in order.
            given: what it returns of that.
            old: inputs of which it returns copies besides, as they are before its writes.
            writes: by input, what is written to it.
        """
        inside = set(body)
        for node in body:
            for before in node.all_input_nodes:
                if before not in inside:
                    self.read(before)
        for node in (*writes, *old):
            self.read(node)
        made, aten = self._made, torch.ops.aten
        for node in body:
            made[node] = self._graph.node_copy(node, lambda n: made[n])
        copies = []
        for node in old:
            copy = self._graph.call_function(aten.clone.default, (made[node],))
            copy.meta = dict(node.meta)
            copies.append(copy)
        for target, value in writes.items():
            written = self._graph.call_function(aten.copy_.default, (made[target], made[value]))
            written.meta = dict(target.meta)
        self._graph.output([*[made[node] for node in given], *copies])
        return fx.GraphModule(self._module, self._graph)
