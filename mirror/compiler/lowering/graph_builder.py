"""Builder: creates the graph of one program from nodes of a step's graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import fx


class Builder:
    """Makes the graph of one program.

    Args:
        module: that of the whole step.
        slot_of: returns the slot of a value that the program takes.

    Attributes:
        reads: slots of the inputs.
    """

    def __init__(self, module: fx.GraphModule, slot_of: Callable[[fx.Node], int]) -> None:
        self._module, self._slot_of = module, slot_of
        self._graph, self._made = fx.Graph(), dict[fx.Node, fx.Node]()
        self.reads: list[int] = []

    def read(self, node: fx.Node) -> fx.Node:
        """Returns the placeholder of a value that the program takes."""
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
        changing: Collection[fx.Node],
    ) -> fx.GraphModule:
        """Returns the program.

        Args:
            body: the nodes that it computes, in order.
            given: the values of these that it returns.
            old: inputs that it also returns, as copies from before its writes.
            writes: by input, the value that is written to it.
            changing: inputs that some program writes to. Views of them are copied before other
                programs get them.
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

        def copy_of(node: fx.Node) -> fx.Node:
            copy = self._graph.call_function(aten.clone.default, (made[node],))
            copy.meta = dict(node.meta)
            return copy

        copies = [copy_of(node) for node in old]
        returned = [copy_of(n) if seen_through(n) in changing else made[n] for n in given]
        # What is written to one input may be, or view, another one that is written before.
        stable = {
            node: copy_of(node) if len(writes) > 1 and seen_through(node) in writes else made[node]
            for node in writes.values()
        }
        for target, value in writes.items():
            written = self._graph.call_function(aten.copy_.default, (made[target], stable[value]))
            written.meta = dict(target.meta)
        self._graph.output([*returned, *copies])
        return fx.GraphModule(self._module, self._graph)


def seen_through(node: fx.Node) -> fx.Node:
    """Returns the base of a view, or the node itself."""
    while node.all_input_nodes:
        schema = getattr(node.target, "_schema", None)
        is_view = schema is not None and any(r.alias_info is not None for r in schema.returns)
        if not is_view and node.target is not operator.getitem:
            break
        node = node.all_input_nodes[0]
    return node
