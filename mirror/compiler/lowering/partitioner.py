"""Cuts a step's graph at its collective points into programs.

[Note: Levels]
A node that depends on no collective point is of level 0. A node that depends on results of level L
is of level L + 1. Each level has up to two programs, which run in this order:

    shared   once per device: values that are the same on all replicas, and that change what the
             replicas have in common, parameters and optimizer state
    own      once per replica: everything else, up to the tensors for the level's collective points

The usual step is: own of level 0 (forward, backward), the reduction of gradients, shared of level
1 (clipping, update). A node's place depends on its level only, not on its position in the step,
because the graph has no side effects. Writes are last in a program. If a later program uses a
value that is overwritten, it is copied before. A value that is the same on all replicas, and used
in a level without a shared program, is computed by every replica for itself. An optimizer that
steps between programs is a collective point, which writes its parameters after its level's own
program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mirror.compiler.capture.functional_graph import FunctionalGraph, base_of_view, functional
from mirror.compiler.capture.tracer import CollectivePoint
from mirror.compiler.custom_ops import COLLECTIVE, UPDATE
from mirror.compiler.lowering.gradient_packing import PackedSlice, pack_gradients
from mirror.compiler.lowering.step_plan import PlanLevel, ProgramPiece, StepPlan, estimate_work
from mirror.compiler.step_inputs import InputKind, StepInput
from mirror.compiler.torch_internals import graph_module
from mirror.errors import CompileError

_NUMBERS = (
    InputKind.RATE,
    InputKind.NUMBER,
    InputKind.OWN_NUMBER,
    InputKind.COUNT,
    InputKind.WEIGHT,
    InputKind.REPLICA_INDEX,
    InputKind.SEED,
)


def plan_step(
    graph: fx.GraphModule,
    inputs: list[StepInput],
    mode: Any,
    collectives: Sequence[CollectivePoint],
    num_replicas: int,
    *,
    for_inductor: bool,
) -> StepPlan:
    """Returns the pieces of a traced step: its functional graph, with packed gradients, cut.

    Args:
        for_inductor: whether inductor compiles them, or torch's kernels run them.

    Raises:
        CompileError: the step writes different values to a parameter on the replicas, or changes
            an option of an optimizer in place.
    """
    pure = functional(graph, inputs, mode, for_inductor=for_inductor)
    for one in pure.writes:
        if one.kind in _NUMBERS:
            raise CompileError(
                f"the step cannot be compiled: it, or a hook, changes a {one.kind.value} in "
                "place, which an uncompiled step would not see; change it after the step, or pass "
                "fallback='eager'"
            )
    _drop_copies_of_updates(pure.module.graph)
    packings = pack_gradients(pure.module, [collective.op is None for collective in collectives])
    return cut(pure, num_replicas, packings)


def _drop_copies_of_updates(graph: fx.Graph) -> None:
    """Takes out copies of what an update returns: it lies in the parameter already."""
    for node in list(graph.nodes):
        source = node.args[1] if node.target is torch.ops.aten.copy.default else None
        inputs = source.all_input_nodes if isinstance(source, fx.Node) else ()
        if inputs and str(inputs[0].target) == UPDATE:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def cut(
    graph: FunctionalGraph, num_replicas: int, packings: Sequence[list[PackedSlice]] = ()
) -> StepPlan:
    """Cuts a functional graph into levels.

    Raises:
        CompileError: the step writes different values to a parameter on the replicas.
    """
    return _Cutter(graph, num_replicas).cut(packings)


class _Cutter:
    def __init__(self, graph: FunctionalGraph, num_replicas: int) -> None:
        self._graph, self._alone = graph, num_replicas == 1
        self._nodes = list(graph.module.graph.nodes)
        self._holders = [node for node in self._nodes if node.op == "placeholder"]
        self._inputs = dict(zip(self._holders, graph.inputs, strict=True))
        self._holder_of = {id(one): node for node, one in self._inputs.items()}
        (output,) = (node for node in self._nodes if node.op == "output")
        values = list(output.args[0])
        self._results: list[Any] = values[: graph.num_results]
        self._writes = dict(zip(graph.writes, values[graph.num_results :], strict=True))
        self._changing = {self._holder_of[id(one)] for one in self._writes}
        self._level: dict[fx.Node, int] = {}
        self._is_own: dict[fx.Node, bool] = {}
        self._slots: dict[Any, int] = {node: i for i, node in enumerate(self._holders)}
        # In the order of the step, with the tensors that they return.
        self._updates_apart = {n for n in self._nodes if str(n.target) == UPDATE}
        self._collectives = {
            n: None for n in self._nodes if str(n.target) == COLLECTIVE or n in self._updates_apart
        }
        self._reduced = {user for node in self._collectives for user in node.users}
        # The parameters that an update apart writes last, with the point.
        self._written_apart: dict[StepInput, fx.Node] = {}
        for one, value in self._writes.items():
            if value.all_input_nodes and value.all_input_nodes[0] in self._updates_apart:
                self._written_apart[one] = value.all_input_nodes[0]

    def cut(self, packings: Sequence[list[PackedSlice]]) -> StepPlan:
        self._place()
        own_needs, shared_needs = self._needs()
        self._save(own_needs, shared_needs)
        levels = []
        for level in range(self._num_levels):
            levels.append(
                PlanLevel(
                    self._piece(level, shared_needs[level], is_own=False),
                    self._piece(level, own_needs[level], is_own=True),
                    [
                        self._collective_slots(node)
                        for node in self._collectives
                        if self._level[node] == level
                    ],
                )
            )
        after_all = self._num_levels, True
        results = [self._slots[self._slot_key(node, *after_all)] for node in self._results]
        apart = self._written_apart
        written = [self._slots[self._holder_of[id(o)]] for o in self._writes if o not in apart]
        return StepPlan(levels, len(self._slots), results, written, list(packings))

    # The place of each node

    def _place(self) -> None:
        """Finds the level of every node, whether it is a replica's own, and of every write."""
        for node in self._nodes:
            before = node.all_input_nodes
            level = max((self._level[n] + (n in self._collectives) for n in before), default=0)
            self._level[node] = level
            if node.op == "placeholder":
                self._is_own[node] = self._alone or self._inputs[node].kind.is_own
            elif node in self._collectives:
                self._is_own[node] = False
            else:
                self._is_own[node] = self._alone or any(self._is_own[n] for n in before)
        self._num_levels = 1 + max(
            [self._level[n] + (n in self._collectives) for n in self._nodes if n.op != "output"],
            default=0,
        )
        shared = [one for one in self._writes if not one.kind.is_own and not self._alone]
        for one in shared:
            value = self._writes[one]
            if self._is_own[value]:
                raise CompileError(_own_write(_name_of(one)))
        for node in () if self._alone else self._updates_apart:
            if any(self._is_own[value] for value in _inputs_of(node)):
                raise CompileError(_own_write("the optimizer a parameter or a gradient with"))
        apart = {self._level[node] for node in self._updates_apart}
        updates = sorted(apart.union(self._level[self._writes[one]] for one in shared) - {0})
        self._updates = set(updates or ([0] if shared else []))
        # Values of level 0, such as step counts, are written with the last update.
        last = max(self._updates, default=0)
        self._write_level = {
            one: (
                self._level[value]
                if one.kind.is_own or self._level[value] in self._updates or self._alone
                else last
            )
            for one, value in self._writes.items()
        } | {one: self._level[node] for one, node in self._written_apart.items()}

    def _is_shared(self, node: fx.Node) -> bool:
        """Whether a value is computed once per device: in a level with a shared program."""
        return (
            not self._is_own[node]
            and self._level[node] in self._updates
            and node.op != "placeholder"
            and node not in self._collectives
        )

    def _sinks(self) -> tuple[list[list[fx.Node]], list[list[fx.Node]]]:
        """Returns, by level, the values that own and shared programs must compute."""
        own: list[list[fx.Node]] = [[] for _ in range(self._num_levels)]
        shared: list[list[fx.Node]] = [[] for _ in range(self._num_levels)]
        for node in self._collectives:
            for value in _inputs_of(node):
                self._sink(own, shared, value, self._level[node])
        for one, value in self._writes.items():
            if one in self._written_apart:
                continue
            level = self._write_level[one]
            (own if one.kind.is_own or self._alone else shared)[level].append(value)
        for value in self._results:
            self._sink(own, shared, value, self._level[value])
        return own, shared

    def _sink(self, own: Any, shared: Any, value: fx.Node, level: int) -> None:
        if value.op == "placeholder" or value in self._reduced:
            return
        if self._is_shared(value):
            shared[self._level[value]].append(value)
        else:
            own[level].append(value)

    def _needs(self) -> tuple[list[set[fx.Node]], list[set[fx.Node]]]:
        """Returns, by level, the nodes that own and shared programs consist of."""
        own_sinks, shared_sinks = self._sinks()
        own: list[set[fx.Node]] = [set() for _ in own_sinks]
        shared: list[set[fx.Node]] = [set() for _ in own_sinks]
        # Own programs, last level first: values needed from an earlier level are computed there.
        for level in reversed(range(self._num_levels)):
            stack = list(own_sinks[level])
            while stack:
                node = stack.pop()
                if node.op == "placeholder" or node in self._reduced or node in own[level]:
                    continue
                if self._is_shared(node):
                    shared_sinks[self._level[node]].append(node)
                elif self._level[node] < level:
                    own_sinks[self._level[node]].append(node)
                else:
                    own[level].add(node)
                    stack += node.all_input_nodes
        known: set[fx.Node] = set()
        for level in range(self._num_levels):
            stack = list(shared_sinks[level])
            while stack:
                node = stack.pop()
                done = node in known or node in shared[level]
                if node.op == "placeholder" or node in self._reduced or done:
                    continue
                shared[level].add(node)
                stack += node.all_input_nodes
            known |= shared[level]
        return own, shared

    # Values between programs

    def _save(self, own: list[set[fx.Node]], shared: list[set[fx.Node]]) -> None:
        """Gives a slot to each value that another program, or the caller, uses."""
        self._by: dict[tuple[int, bool], set[fx.Node]] = {}
        self._old: dict[tuple[int, bool], set[fx.Node]] = {}
        self._own_nodes, self._shared_nodes = own, shared
        for level in range(self._num_levels):
            for is_own, nodes in ((False, shared[level]), (True, own[level])):
                for node in nodes:
                    for before in node.all_input_nodes:
                        self._use(before, level, is_own, nodes)
        for node in self._collectives:
            for value in _inputs_of(node):
                self._use(value, self._level[node], True, set())
            for user in node.users:
                self._slots.setdefault(user, len(self._slots))
        for one, value in self._writes.items():
            if one in self._written_apart:
                continue
            level, is_own = self._writer(one)
            self._use(value, level, is_own, own[level] if is_own else shared[level])
        for value in self._results:
            self._use(value, self._num_levels, True, set())

    def _use(self, value: fx.Node, level: int, is_own: bool, here: set[fx.Node]) -> None:
        """Records that a program uses a value of another program."""
        if value in here or value in self._reduced:
            return
        if value.op == "placeholder":
            if self._is_overwritten(value, level, is_own):
                self._old.setdefault(self._writer(self._inputs[value]), set()).add(value)
                self._slots.setdefault(("old", value), len(self._slots))
            return
        self._by.setdefault(self._producer_of(value, is_own), set()).add(value)
        self._slots.setdefault(value, len(self._slots))

    def _producer_of(self, value: fx.Node, for_own: bool) -> tuple[int, bool]:
        level = self._level[value]
        if for_own and value in self._own_nodes[level]:
            return level, True
        for at in range(self._num_levels):
            if value in self._shared_nodes[at]:
                return at, False
        return level, True

    def _collective_slots(self, node: fx.Node) -> tuple[int, list[int], list[int]]:
        number: Any = node.args[1]
        inputs = [self._slots[value] for value in _inputs_of(node)]
        results: dict[int, int] = {}
        for user in node.users:
            results[user.args[1]] = self._slots[user]  # type: ignore[index]
        return number, inputs, [results.get(i, -1) for i in range(len(inputs))]

    # Programs

    def _piece(self, level: int, nodes: set[fx.Node], *, is_own: bool) -> ProgramPiece | None:
        writes = {
            one: value
            for one, value in self._writes.items()
            if self._writer(one) == (level, is_own) and one not in self._written_apart
        }
        old = [n for n in self._holders if n in self._old.get((level, is_own), ())]
        if not (nodes or writes or old):
            return None
        given = [n for n in self._nodes if n in self._by.get((level, is_own), ())]
        builder = ProgramGraph(
            self._graph.module, lambda node: self._slots[self._slot_key(node, level, is_own)]
        )
        body = [node for node in self._nodes if node in nodes]
        for value in writes.values():
            if value not in nodes:
                builder.read(value)
        targets = {self._holder_of[id(one)]: value for one, value in writes.items()}
        graph = builder.build(body, given, old, targets, self._changing)
        gives = [*[self._slots[n] for n in given], *[self._slots["old", n] for n in old]]
        written = [self._slots[node] for node in targets]
        return ProgramPiece(
            is_own, graph, builder.reads, gives, written, estimate_work(graph.graph.nodes)
        )

    def _slot_key(self, node: fx.Node, level: int, is_own: bool) -> Any:
        """Returns the key of the slot in which a program finds a value."""
        return ("old", node) if self._is_overwritten(node, level, is_own) else node

    def _writer(self, one: StepInput) -> tuple[int, bool]:
        """Returns the level of the program that writes an input, and whether it is an own one."""
        is_own = one.kind.is_own or self._alone or one in self._written_apart
        return self._write_level[one], is_own

    def _is_overwritten(self, node: fx.Node, level: int, is_own: bool) -> bool:
        """Whether another program has overwritten an input before a program uses it."""
        one = self._inputs.get(node)
        # Shared programs of a level run before own ones.
        return one in self._writes and self._writer(one) < (level, is_own)


class ProgramGraph:
    """Makes the graph of one program.

    Args:
        module: the graph of the whole step.
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
        returned = [copy_of(n) if base_of_view(n) in changing else made[n] for n in given]
        # The value written to one input may be a view of another input, which is written first.
        stable = {
            node: copy_of(node) if len(writes) > 1 and base_of_view(node) in writes else made[node]
            for node in writes.values()
        }
        for target, value in writes.items():
            written = self._graph.call_function(aten.copy_.default, (made[target], stable[value]))
            written.meta = dict(target.meta)
        self._graph.output([*returned, *copies])
        return graph_module(self._module, self._graph)


def _inputs_of(collective: fx.Node) -> list[fx.Node]:
    """Returns the tensors that a replica contributes at a collective point."""
    inputs: Any = collective.args[0]
    return list(inputs)


def _name_of(one: StepInput) -> str:
    return {
        InputKind.PARAMETER: lambda: f"parameter {one.of.name!r}",
        InputKind.STATE: lambda: (
            f"optimizer state {one.key[1]!r} of parameter {one.key[0].name!r}"
        ),
    }.get(one.kind, lambda: f"a {one.kind.value}")()


def _own_write(what: str) -> str:
    return (
        f"the step cannot be compiled: it gives {what} a value that differs between the replicas; "
        "compute it of reduced gradients, or all_reduce what it is made of: "
        "mirror.get_replica_context().all_reduce('mean', value)"
    )
