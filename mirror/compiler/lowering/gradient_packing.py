"""Packs local gradients into one flat tensor per dtype, except large ones on the CPU.

A tensor per gradient costs a call wherever Python handles it. On the CPU, gradients above
``LARGE_BYTES`` stay tensors of their own: copying 25 MB takes longer than all the calls that it
saves. On GPUs all are packed, inside the graph: otherwise the reduction would pack them outside,
and copy them back, with two launches per replica and pack of ``bytes_per_pack``. It sums a flat
tensor that is larger than that in place.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mirror.compiler.capture.functional_graph import base_of_view
from mirror.compiler.custom_ops import COLLECTIVE

LARGE_BYTES = 2**20
PackedSlice = tuple[int, int, tuple[int, ...]]
_getitem = operator.getitem


def pack_gradients(
    module: fx.GraphModule, are_gradients: Sequence[bool]
) -> list[list[PackedSlice]]:
    """Joins the small gradients of each collective point, in a functional graph.

    Args:
        are_gradients: for each collective point, whether it reduces gradients.

    Returns:
        For each collective point, the ``packing`` of its gradients; see ``CollectivePoint``.
    """
    graph = module.graph
    packings: list[list[PackedSlice]] = [[] for _ in are_gradients]
    for node in list(graph.nodes):
        if str(node.target) == COLLECTIVE:
            _own_inputs(graph, node)
        if str(node.target) == COLLECTIVE and are_gradients[node.args[1]]:
            packings[node.args[1]] = _pack(graph, node)
    graph.eliminate_dead_code()
    module.recompile()
    return packings


def _own_inputs(graph: fx.Graph, collective: fx.Node) -> None:
    """Copies inputs of a collective point that have another use: it may reduce in place."""
    inputs: list[fx.Node] = list(collective.args[0])  # type: ignore[arg-type]
    known: set[fx.Node] = set()
    for i, node in enumerate(inputs):
        base = base_of_view(node)
        if base in known or base.op == "placeholder":
            with graph.inserting_before(collective):
                inputs[i] = graph.call_function(torch.ops.aten.clone.default, (node,))
                inputs[i].meta = dict(node.meta)
        known.add(base)
    collective.args = (inputs, collective.args[1])


def _pack(graph: fx.Graph, collective: fx.Node) -> list[PackedSlice]:
    """Joins the small gradients of a collective point; returns their ``packing``."""
    aten = torch.ops.aten
    grads: list[fx.Node] = list(collective.args[0])  # type: ignore[arg-type]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, grad in enumerate(grads):
        value = grad.meta["val"]
        is_small = value.numel() * value.element_size() <= LARGE_BYTES
        if is_small or value.device.type != "cpu":
            by_dtype.setdefault(value.dtype, []).append(i)
    groups = [positions for positions in by_dtype.values() if len(positions) > 1]
    packing = {i: (i, 0, tuple(grad.meta["val"].shape)) for i, grad in enumerate(grads)}
    if not groups:
        return [*packing.values()]
    joined = {i for positions in groups for i in positions}
    apart = [i for i in range(len(grads)) if i not in joined]

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        values = [torch.fx.map_arg(arg, lambda n: n.meta["val"]) for arg in args]
        node.meta["val"] = target(*values)
        return node

    with graph.inserting_before(collective):
        flats = [
            call(
                aten.cat.default,
                [call(aten.reshape.default, grads[i], [-1]) for i in positions],
            )
            for positions in groups
        ]
        met = call(
            torch.ops.mirror.collective.default,
            [*flats, *[grads[i] for i in apart]],
            collective.args[1],
        )
    users = {user.args[1]: user for user in collective.users}
    at = collective
    for number, positions in enumerate(groups):
        with graph.inserting_after(at):
            flat = graph.call_function(_getitem, (met, number))
            flat.meta["val"] = met.meta["val"][number]
        at, begin = flat, 0
        for i in positions:
            shape = list(grads[i].meta["val"].shape)
            size = math.prod(shape)
            packing[i] = number, begin, tuple(shape)
            if i in users:
                with graph.inserting_before(users[i]):
                    part = call(aten.slice.Tensor, flat, 0, begin, begin + size)
                    users[i].replace_all_uses_with(call(aten.view.default, part, shape))
            begin += size
    for number, i in enumerate(apart, len(groups)):
        packing[i] = number, 0, packing[i][2]
        if i in users:
            with graph.inserting_before(users[i]):
                one = graph.call_function(_getitem, (met, number))
                one.meta["val"] = met.meta["val"][number]
                users[i].replace_all_uses_with(one)
    for user in list(collective.users):
        graph.erase_node(user)
    graph.erase_node(collective)
    return [*packing.values()]
