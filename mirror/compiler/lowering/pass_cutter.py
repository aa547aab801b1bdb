"""Cuts the graph of a module's call and its gradients into a forward and a backward program.

    forward    what the outputs and the written buffers depend on, and every draw of random numbers
    backward   the rest, up to the gradients; it reads inputs, and values that the forward saves

The graph has the gradients of the outputs as inputs. What an uncompiled backward pass computes of
saved tensors alone, it computes in the backward pass here, too: the two keep the same activations.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from mirror.compiler.capture.functional_graph import FunctionalGraph
from mirror.compiler.capture.functional_rng import draws_nothing
from mirror.compiler.lowering.partitioner import ProgramGraph
from mirror.compiler.lowering.step_plan import ProgramPiece, estimate_work


@dataclass(eq=False, slots=True)
class PassPrograms:
    """The programs of a module's call. The first slots are the inputs of its trace.

    Attributes:
        backward: ``None`` if no gradient is computed.
        num_slots: the number of values.
        outputs: the slots of the tensors that the call returns.
        gradients: the slots of the gradients.
        saved: the slots that the backward program reads, except the gradients of the outputs.
        written: the slots of the inputs that the forward program writes.
        statistics: those of them that a batch norm writes: uncompiled, it makes no new version.
        reads_written: whether outputs or gradients depend on these inputs.
    """

    forward: ProgramPiece
    backward: ProgramPiece | None
    num_slots: int
    outputs: list[int]
    gradients: list[int]
    saved: list[int]
    written: list[int]
    statistics: set[int]
    reads_written: bool


def cut_passes(graph: FunctionalGraph, num_outputs: int, tangents: set[int]) -> PassPrograms:
    """Cuts a functional graph whose results are outputs, and after them gradients.

    Args:
        tangents: the numbers of the inputs that are gradients of outputs.
    """
    nodes = list(graph.module.graph.nodes)
    holders = [node for node in nodes if node.op == "placeholder"]
    (output,) = graph.module.graph.find_nodes(op="output")
    values: list[fx.Node] = list(output.args[0])
    outputs, gradients = values[:num_outputs], values[num_outputs : graph.num_results]
    by_input = {id(one): holder for holder, one in zip(holders, graph.inputs, strict=True)}
    writes = {
        by_input[id(one)]: value
        for one, value in zip(graph.writes, values[graph.num_results :], strict=True)
    }
    # 1. Give each node to a pass.
    after = {holder for i, holder in enumerate(holders) if i in tangents}
    for node in nodes:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    draws = [node for node in nodes if node not in after and _draws(node)]
    ahead = _ancestors([*outputs, *writes.values(), *draws])
    ahead |= {n for n in nodes if n.target is operator.getitem and n.args[0] in ahead}
    behind = _ancestors(gradients) - ahead
    ahead_of_results = _ancestors([*outputs, *gradients])
    # 2. Give a slot to each value that the passes exchange or return.
    slots: dict[object, int] = {holder: i for i, holder in enumerate(holders)}
    read = {n: None for node in behind for n in node.all_input_nodes if n not in behind}
    needed = [node for node in nodes if node in read or node in gradients]
    saved = [n for n in needed if n not in behind]
    given = [n for n in nodes if n in ahead and (n in saved or n in outputs)]
    old = [n for n in saved if n in writes]  # read as it was before the forward program
    for key in (*given, *[("old", n) for n in old]):
        slots.setdefault(key, len(slots))

    def slot_of(node: fx.Node) -> int:
        return slots[("old", node) if node in writes else node]

    forward = ProgramGraph(graph.module, slots.__getitem__)
    for value in writes.values():
        if value not in ahead:
            forward.read(value)
    body = [node for node in nodes if node in ahead and node.op != "placeholder"]
    module = forward.build(body, given, old, writes, list(writes))
    gives = [*[slots[n] for n in given], *[slots["old", n] for n in old]]
    written = [slots[n] for n in writes]
    first = ProgramPiece(
        True, module, forward.reads, gives, written, estimate_work(module.graph.nodes)
    )
    # 3. The backward program; a gradient that the forward computes needs none.
    last = None
    body = [node for node in nodes if node in behind and node.op != "placeholder"]
    made = list(dict.fromkeys(n for n in gradients if n in behind and n.op != "placeholder"))
    if body:
        for node in made:
            slots.setdefault(node, len(slots))
        backward = ProgramGraph(graph.module, slot_of)
        module = backward.build(body, made, [], {}, ())
        last = ProgramPiece(
            True,
            module,
            backward.reads,
            [slots[n] for n in made],
            [],
            estimate_work(module.graph.nodes),
        )
    return PassPrograms(
        first,
        last,
        len(slots),
        [slots[n] for n in outputs],
        [slot_of(n) for n in gradients],
        [slot_of(n) for n in saved if slots[n] not in tangents],
        written,
        {slots[n] for n, value in writes.items() if _is_of_batch_norm(value)},
        any(_is_read(holder, ahead_of_results) for holder in writes),
    )


def _is_of_batch_norm(value: fx.Node) -> bool:
    return value.target is operator.getitem and "batch_norm" in str(value.args[0].target)  # type: ignore[union-attr]


def _is_read(holder: fx.Node, nodes: set[fx.Node]) -> bool:
    """Whether values depend on an input, other than as the old statistics of a batch norm."""
    return any(
        user in nodes and not ("batch_norm" in str(user.target) and holder in user.args[3:5])
        for user in holder.users
    )


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the nodes, and what they depend on, except inputs."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _draws(node: fx.Node) -> bool:
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return is_random and not draws_nothing(node.target, node.args, node.kwargs)
