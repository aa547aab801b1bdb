"""The graph of a step, free of side effects except the writes at its end.

The first pass follows the step with autograd, and writes in place as the step does. The second
pass turns every write into a new value: node by node where that is possible, and for inductor by a
trace of the first graph, without autograd, in which operations are decomposed. After it each value
depends on its inputs only, and ``lowering/partitioner.py`` can cut the graph anywhere. The last
value of an input is written to it at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mirror.compiler.capture.write_rewriting import KeepingDraws, rewrite_writes
from mirror.compiler.step_inputs import InputKind, StepInput
from mirror.compiler.torch_internals import (
    inductor_decompositions,
    is_fake,
    is_operation,
    kernel_decompositions,
    make_fake,
    schema_of,
    trace_graph,
)


@dataclass(eq=False, slots=True)
class FunctionalGraph:
    """A step as a graph of values.

    Attributes:
        module: its placeholders are ``inputs``; its output is a list of ``results`` values, and of
            one for each of ``writes``.
        writes: the inputs that the step has changed.
        num_results: how many values the step returns or leaves.
    """

    module: fx.GraphModule
    inputs: list[StepInput]
    writes: list[StepInput]
    num_results: int


def trace_functional(
    call: Callable[[], Sequence[Tensor]],
    mode: Any,
    inputs: list[StepInput],
    *,
    keeps_kernels: bool = False,
) -> tuple[fx.GraphModule, list[StepInput]]:
    """Traces ``call``, which uses the fakes of ``inputs``; returns the graph and all its inputs.

    Inputs may be added while it is traced. Other tensors that it uses become inputs, too.

    Args:
        keeps_kernels: see ``trace_graph``.
    """
    known, caches = list(inputs), torch.is_autocast_cache_enabled()

    def function(*_: Tensor) -> Sequence[Tensor]:
        # make_fx turns the cache off. Then a parameter that is used twice has two casts, whose
        # gradients add up in float32, not in the dtype of autocast.
        torch.set_autocast_cache_enabled(caches)
        return list(call())

    fakes = [one.fake for one in known]
    graph = trace_graph(function, mode, fakes, keeps_kernels=keeps_kernels)
    by_fake = {id(one.fake): one for one in inputs}
    found: list[StepInput] = []
    holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    found_nodes: dict[int, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(graph, node.target)
        if id(value) in found_nodes:
            node.replace_all_uses_with(found_nodes[id(value)])
            graph.graph.erase_node(node)
            continue
        one = by_fake.get(id(value))
        if one is None:
            fake = value if isinstance(value, is_fake) else make_fake(mode, value)
            one = StepInput(InputKind.SHARED, fake, value=value)
        found.append(one)
        with graph.graph.inserting_after(holders[-1]):
            holder = graph.graph.placeholder(f"found_{len(found)}")
        holder.meta["val"] = one.fake
        holders.append(holder)
        node.replace_all_uses_with(holder)
        graph.graph.erase_node(node)
        found_nodes[id(value)] = holder
    graph.recompile()
    return graph, [*known, *found]


def written_inputs(graph: fx.GraphModule, inputs: list[StepInput]) -> list[StepInput]:
    """Returns the inputs that a graph with writes changes, themselves or through a view."""
    holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    by_holder = dict(zip(holders, inputs, strict=True))
    found: dict[fx.Node, None] = {}
    for node in graph.graph.nodes:
        if not is_operation(node.target) or not schema_of(node.target).is_mutable:
            continue
        for i, argument in enumerate(schema_of(node.target).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
                targets = value if isinstance(value, (list, tuple)) else [value]
                found |= {base_of_view(t): None for t in targets if isinstance(t, fx.Node)}
    return [by_holder[node] for node in found if node in by_holder]


def functional(
    graph: fx.GraphModule,
    inputs: list[StepInput],
    mode: Any,
    *,
    for_inductor: bool,
    keeps_kernels: bool = False,
) -> FunctionalGraph:
    """Returns a traced graph without writes but at its end.

    Args:
        keeps_kernels: see ``trace_graph``.
        for_inductor: whether operations are decomposed as inductor needs it. Torch's kernels are
            faster whole: a batch norm, say, would become twenty passes over its input.
    """
    for node in reversed(list(graph.graph.nodes)):
        if "profiler" in str(node.target):  # a step's name, for torch.profiler
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()  # views that autograd makes of what it has made views of
    last = None if for_inductor else rewrite_writes(graph.graph, mode)
    pure, writes = graph, last
    if writes is None:
        pure, writes = _retrace(
            graph, inputs, mode, for_inductor=for_inductor, keeps_kernels=keeps_kernels
        )
    holders = [node for node in pure.graph.nodes if node.op == "placeholder"]
    by_holder = dict(zip(holders, inputs, strict=True))
    (output,) = (node for node in pure.graph.nodes if node.op == "output")
    results = [_detached(node) if node.op == "placeholder" else node for node in output.args[0]]
    output.args = ([*results, *writes.values()],)
    pure.graph.eliminate_dead_code()
    pure.recompile()
    return FunctionalGraph(pure, inputs, [by_holder[node] for node in writes], len(results))


def _detached(holder: fx.Node) -> fx.Node:
    """Returns an input as a result: another tensor, of the same memory, as it was traced."""
    (output,) = holder.graph.find_nodes(op="output")
    with holder.graph.inserting_before(output):
        found = holder.graph.call_function(torch.ops.aten.detach.default, (holder,))
    found.meta = dict(holder.meta)
    return found


def _retrace(
    graph: fx.GraphModule,
    inputs: list[StepInput],
    mode: Any,
    *,
    for_inductor: bool,
    keeps_kernels: bool,
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Traces a graph without its writes; returns, by input that it writes, its last value."""
    call = graph if for_inductor else KeepingDraws(graph).run

    def function(*args: Tensor) -> Any:
        with torch.no_grad():
            return call(*args)

    fakes = [one.fake for one in inputs]
    without_writes = torch.func.functionalize(function, remove="mutations")
    decompositions = inductor_decompositions() if for_inductor else kernel_decompositions()
    pure = trace_graph(without_writes, mode, fakes, decompositions, keeps_kernels=keeps_kernels)
    writes: dict[fx.Node, fx.Node] = {}
    for node in list(pure.graph.nodes):
        is_copy = node.target is torch.ops.aten.copy_.default
        if is_copy and node.args[0].op == "placeholder":
            writes[node.args[0]] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            pure.graph.erase_node(node)
    return pure, writes


def base_of_view(node: fx.Node) -> fx.Node:
    """Returns the base of a view, or the node itself."""
    while node.all_input_nodes and is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a value may share memory with an input of its node; an element of a list may."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is operator.getitem
    return any(result.alias_info is not None for result in schema.returns)
