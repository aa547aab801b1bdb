"""Rewrites the writes of a traced graph as new values, node by node, without a second trace.

    in the traced graph                      afterwards
    aten.add_(x, y)                          aten.add(x, y); what follows uses the result
    aten._foreach_add_(xs, ys)               aten._foreach_add(xs, ys), and its elements
    aten._native_batch_norm_legit(...)       its functional form, which also returns the statistics
    aten.detach(x)                           x
    aten.t(x), and later a write of x        the view again, of the new value, where it is used
    aten.relu_(z.view(...))                  aten.relu of the view, if nothing else uses z later
    aten.relu_(w), where w has gaps          aten.copy(w, aten.relu(w)), which has gaps, too
    aten.bernoulli_(w), w transposed         aten.bernoulli of w as it lies in memory: the numbers
                                             are drawn in this order

That is what torch's functionalization computes, which calls every operation again to find it out,
and takes as long as the trace. Some graphs are left to it: those that write through a view to a
tensor that is used as a whole later (``weight[0].zero_()``), change a tensor's dtype by the way,
or have operations whose functional form is not known. The layout stays, since kernels round by it:
an exponential of 16 numbers in a row may have other bits than one of two rows of 8.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mirror.compiler.overloads import functional_overload
from mirror.compiler.torch_internals import (
    KeepingPlaces,
    call_with_fakes,
    is_operation,
    schema_of,
    without_guards,
)

aten = torch.ops.aten
_ALIASES = (aten.detach.default, aten.alias.default)
# They write statistics, and their schemas do not say so.
UNDECLARED = ("aten.native_batch_norm.", "aten.cudnn_batch_norm.", "aten.miopen_batch_norm.")
_IN_PLACE_VIEWS = {
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def rewrite_writes(graph: fx.Graph, mode: Any) -> dict[fx.Node, fx.Node] | None:
    """Rewrites the writes of a graph.

    Returns:
        By input that the graph writes, its last value. ``None``: the graph cannot be rewritten,
        and computes what it did.
    """
    positions = {node: i for i, node in enumerate(graph.nodes)}
    memory = _Memory(positions)
    plans: dict[fx.Node, _Write] = {}
    for node in graph.nodes:
        view = _IN_PLACE_VIEWS.get(node.target)
        if view is not None and len(node.args[0].users) == 1:
            node.target = view
        if not memory.add(node):
            return None
        if is_operation(node.target) and schema_of(node.target).is_mutable:
            plan = _plan(node, memory, mode)
            if plan is None:
                return None
            plans[node] = plan
    return _Rewriting(graph, memory, plans).run()


class _Memory:
    """Which nodes of a graph are the memory of which others.

    Args:
        positions: the positions of all nodes in the graph.

    Attributes:
        whole: by node that is the same tensor as another one, the first such node.
        views: by view, the node that it is a view of; that one may be a view, too.
    """

    def __init__(self, positions: dict[fx.Node, int]) -> None:
        self._positions = positions
        self.whole: dict[fx.Node, fx.Node] = {}
        self.views: dict[fx.Node, fx.Node] = {}
        self._shared_by: dict[fx.Node, list[fx.Node]] = {}
        self._written: set[fx.Node] = set()

    def root(self, node: fx.Node) -> fx.Node:
        """Returns the first node that is this tensor."""
        return self.whole.get(node, node)

    def bases(self, node: fx.Node) -> list[fx.Node]:
        """Returns what a node is a view of, from the nearest to the one that made the memory."""
        found: list[fx.Node] = []
        while node in self.views:
            node = self.views[node]
            found.append(node)
        return found

    def write(self, root: fx.Node, at: fx.Node) -> bool:
        """Records that ``at`` writes a tensor; returns False if others would have to see it.

        A view that is written is a tensor of its own from then on, if nothing else uses the memory
        that it is a view of.
        """
        bases = self.bases(root)
        if bases:
            if bases[-1].op == "placeholder" or not self._written.isdisjoint(bases):
                return False
            now, waiting = self._positions[at], [bases[-1]]
            while waiting:
                one = waiting.pop()
                if one is not root:
                    if any(self._positions[user] >= now for user in one.users):
                        return False
                    waiting += self._shared_by.get(one, ())
            del self.views[root]
        self._written.add(root)
        return True

    def add(self, node: fx.Node) -> bool:
        """Records the next node; returns False if it cannot be told what its memory is."""
        if node.op in ("placeholder", "output"):
            return True
        if node.op != "call_function" or str(node.target).startswith(UNDECLARED):
            return False
        if node.target is operator.getitem:
            (source,) = node.all_input_nodes
            return self._add_view(node) if self.root(source) in self.views else True
        if not is_operation(node.target):
            return isinstance(node.meta.get("val"), _NUMBERS)
        schema = schema_of(node.target)
        if schema.is_mutable:
            written = _written(node)
            if len(written) == 1 and any(r.alias_info is not None for r in schema.returns):
                self._share(self.whole, node, written[0])
            return True
        if any(result.alias_info is not None for result in schema.returns):
            return self._add_view(node)
        return True

    def _add_view(self, node: fx.Node) -> bool:
        base = node.args[0] if node.args else None
        if not isinstance(base, fx.Node):
            return False
        self._share(self.whole if node.target in _ALIASES else self.views, node, base)
        return True

    def _share(self, how: dict[fx.Node, fx.Node], node: fx.Node, base: fx.Node) -> None:
        how[node] = self.root(base)
        self._shared_by.setdefault(how[node], []).append(node)


class _Write:
    """How a write becomes a value.

    Attributes:
        target: the functional form.
        roots: the nodes whose memory is written.
        value: the fake of what ``target`` returns.
        first: the position of the first new value among the results; ``None``: there is only one.
        layouts: for each root, its fake if the new value has other strides.
        order: the order of dimensions in which ``target`` gets and returns the tensor; ``None``:
            as it is.
    """

    def __init__(
        self,
        target: Any,
        roots: Sequence[fx.Node],
        value: Any,
        first: int | None,
        layouts: Sequence[Tensor | None],
        order: list[int] | None,
    ) -> None:
        self.target, self.roots, self.value, self.first = target, roots, value, first
        self.layouts, self.order = layouts, order


def _plan(node: fx.Node, memory: _Memory, mode: Any) -> _Write | None:
    """Returns how a write becomes a value; ``None`` if that is not known."""
    target = functional_overload(node.target)
    written = _written(node)
    roots = [memory.root(one) for one in written]
    if target is None or not written or len(set(roots)) != len(roots):
        return None
    if target is aten.bernoulli.p and len(node.args) == 1:
        node.args = (*node.args, 0.5)  # which only the operation in place takes by default
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    value = call_with_fakes(mode, target, args, kwargs)
    several = isinstance(value, (list, tuple))
    first = len(value) - len(written) if several else None
    values = list(value)[first:] if several else [value]
    before = [one.meta["val"] for one in written]
    if not all(map(_have_one_shape, before, values)):
        return None
    order = None
    if torch.Tag.nondeterministic_seeded in target.tags:
        if not all(map(_have_one_layout, before, values)):
            if len(written) > 1 or node.args[0] is not written[0]:
                return None
            order = _order_in_memory(before[0])
            turned = call_with_fakes(mode, target, (before[0].permute(order), *args[1:]), kwargs)
            values = [turned.permute(_inverse(order))]
    if not all(memory.write(root, node) for root in roots):
        return None
    layouts = [
        None if _have_one_layout(*pair) else pair[0] for pair in zip(before, values, strict=True)
    ]
    return _Write(target, roots, value if order is None else turned, first, layouts, order)


class KeepingDraws(KeepingPlaces):
    """Runs a graph that is traced again without its writes: what is drawn keeps its order."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.bernoulli_.float:  # others keep the layout of a tensor without gaps
            turned = args[0].permute(_order_in_memory(args[0]))
            super().call_function(target, (turned, *args[1:]), kwargs)
            return args[0]
        return super().call_function(target, args, kwargs)


def draws_into_gaps(node: fx.Node) -> bool:
    """Whether a node draws numbers into a tensor with gaps, by a kernel for that."""
    target: Any = node.target
    if not is_operation(target) or target is aten.bernoulli_.float:
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags or not schema_of(target).is_mutable:
        return False
    written = [one.meta["val"] for one in _written(node)]
    return not all(one.permute(_order_in_memory(one)).is_contiguous() for one in written)


def _order_in_memory(tensor: Tensor) -> list[int]:
    """Returns the dimensions, those of neighbours in memory last."""
    strides = without_guards(tensor.stride())
    return sorted(range(tensor.dim()), key=lambda d: -strides[d])


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda i: order[i])


def _written(node: fx.Node) -> list[fx.Node]:
    """Returns the tensors that an operation writes, in the order of its arguments."""
    found: list[fx.Node] = []
    for i, argument in enumerate(schema_of(node.target).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value: Any = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            found += [one for one in values if isinstance(one, fx.Node)]
    return found


def _have_one_shape(one: Tensor, two: Tensor) -> bool:
    return (
        one.dtype == two.dtype
        and one.layout is two.layout is torch.strided
        and without_guards(one.shape) == without_guards(two.shape)
    )


def _have_one_layout(one: Tensor, two: Tensor) -> bool:
    return without_guards(one.stride()) == without_guards(two.stride())


class _Rewriting:
    """Rewrites a graph in place, from its first node to its last.

    Args:
        plans: by node that writes, how it becomes a value.
    """

    def __init__(self, graph: fx.Graph, memory: _Memory, plans: dict[fx.Node, _Write]) -> None:
        self._graph, self._memory, self._plans = graph, memory, plans
        self._now: dict[fx.Node, fx.Node] = {}  # by root that has been written, its value
        self._num_writes: dict[fx.Node, int] = {}  # by root
        # By view, the node that computes it, and the number of writes of its bases before that.
        self._seen: dict[fx.Node, tuple[fx.Node, int]] = {}

    def run(self) -> dict[fx.Node, fx.Node]:
        """Returns, by input that the graph writes, its last value."""
        for node in list(self._graph.nodes):
            if any(map(self._is_outdated, node.all_input_nodes)):
                with self._graph.inserting_before(node):
                    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self._value)
            if node in self._memory.views:
                self._seen[node] = node, self._count(node)
            elif node in self._plans:
                self._replace(node, self._plans[node])
            elif node in self._memory.whole:
                self._erase(node)
        return {node: value for node, value in self._now.items() if node.op == "placeholder"}

    def _is_outdated(self, node: fx.Node) -> bool:
        if node in self._now:
            return True
        seen = self._seen.get(node)
        return seen is not None and seen != (node, self._count(node))

    def _value(self, node: fx.Node) -> fx.Node:
        """Returns the value that a node has now: what was written, or the view of it."""
        if node in self._now:
            return self._now[node]
        if node not in self._seen:
            return node
        found, num_writes = self._seen[node]
        if num_writes != self._count(node):
            found = self._graph.node_copy(node, self._value)
            self._seen[node] = found, self._count(node)
        return found

    def _count(self, view: fx.Node) -> int:
        return sum(self._num_writes.get(base, 0) for base in self._memory.bases(view))

    def _replace(self, node: fx.Node, plan: _Write) -> None:
        with self._graph.inserting_before(node):
            args = node.args
            if plan.order is not None:
                args = (self._permute(args[0], plan.order), *args[1:])
            made = self._graph.call_function(plan.target, args, dict(node.kwargs))
            made.meta = {**node.meta, "val": plan.value}
            if plan.order is not None:
                made = self._permute(made, _inverse(plan.order))
            for i, root in enumerate(plan.roots):
                value = made
                if plan.first is not None:
                    value = self._graph.call_function(operator.getitem, (made, plan.first + i))
                    value.meta = {**node.meta, "val": plan.value[plan.first + i]}
                like = plan.layouts[i]
                if like is not None:
                    value = self._graph.call_function(
                        aten.copy.default, (self._value(root), value)
                    )
                    value.meta = {**node.meta, "val": like}
                self._now[root] = value
                self._num_writes[root] = self._num_writes.get(root, 0) + 1
        if node in self._memory.whole:
            self._erase(node)
        else:  # its other results come first in the functional form, too
            if plan.first == 1 and isinstance(node.meta["val"], Tensor):
                with self._graph.inserting_before(node):
                    made = self._graph.call_function(operator.getitem, (made, 0))
                made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            self._graph.erase_node(node)

    def _permute(self, node: Any, order: list[int]) -> fx.Node:
        made = self._graph.call_function(aten.permute.default, (node, order))
        made.meta = {**node.meta, "val": node.meta["val"].permute(order)}
        return made

    def _erase(self, node: fx.Node) -> None:
        """Drops a node that is the memory of another one, which its users use instead."""
        node.replace_all_uses_with(self._memory.root(node))
        self._graph.erase_node(node)
