"""Programs: the pieces of a step as functions for each device, compiled or of torch's kernels.

A step is traced once, on the first replica's device. Tensors that it creates there (zeros, masks,
ranges) name that device, and so do copies to it. For another device ``retarget`` changes this name
only. Tensors that the step keeps on the host stay there.
"""

from __future__ import annotations

import copy
import linecache
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mirror.compiler.custom_ops import DRAW
from mirror.compiler.lowering.in_place import update_in_place
from mirror.compiler.lowering.step_plan import ProgramPiece, estimate_work
from mirror.compiler.step_errors import quote
from mirror.compiler.torch_internals import (
    GENERATED,
    Program,
    compile_with_inductor,
    place_of,
    trace_graph,
)

SMALL_PRODUCT = 1024  # multiplications of a matrix product

SlotGetter = Callable[[Sequence[Any]], Sequence[Any]]


class CallableProgram:
    """A piece of a step that is ready to be called.

    Args:
        programs: by device, a function of the list of inputs that returns the outputs.
        graph: the graph whose nodes torch's kernels run one by one; ``None``: it is compiled.

    Attributes:
        get_inputs: returns the inputs out of a replica's values.
        gives: slots of the outputs.
        is_raw: whether its writes leave the version of a tensor as it is.
        work: its approximate number of multiplications.
    """

    __slots__ = (
        "_graph",
        "get_inputs",
        "gives",
        "is_own",
        "is_raw",
        "programs",
        "reads",
        "work",
        "writes",
    )

    def __init__(
        self,
        piece: ProgramPiece,
        programs: Mapping[torch.device, Program],
        *,
        is_raw: bool,
        graph: fx.Graph | None = None,
    ) -> None:
        self.programs, self._graph = dict(programs), graph
        self.is_own = piece.is_own
        self.get_inputs = slot_getter(piece.reads)
        self.reads, self.gives, self.writes = piece.reads, piece.gives, piece.writes
        self.is_raw = is_raw
        self.work = piece.work

    def run(self, values: list[Any], device: torch.device) -> None:
        """Runs the piece on a replica's values, and stores its outputs there."""
        found = self.programs[device](list(self.get_inputs(values)))
        for slot, value in zip(self.gives, found, strict=True):
            values[slot] = value

    def line_of_input(self, position: int) -> str:
        """Returns the user's line that first uses an input; empty if that is not known."""
        if self._graph is None:
            return ""
        holders = self._graph.find_nodes(op="placeholder")
        return next((quote(p) for p in map(place_of, holders[position].users) if p), "")

    def line_of(self, error: Exception) -> str:
        """Returns the user's line whose kernel has raised an error; empty if that is not known."""
        places = {} if self._graph is None else {n.name: place_of(n) for n in self._graph.nodes}
        step, found = error.__traceback__, ""
        while step is not None:
            name = step.tb_frame.f_code.co_filename
            if name.startswith(GENERATED):  # a node a line: ``add = torch.ops.aten.add(x, y)``
                code = linecache.getline(name, step.tb_lineno, step.tb_frame.f_globals)
                place = places.get(code.partition("=")[0].strip())
                found = quote(place) if place else found
            step = step.tb_next
        return found


def slot_getter(slots: list[int]) -> SlotGetter:
    """Returns a function that picks values out of their slots, in C."""
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    return operator.itemgetter(slice(slots[0], slots[0] + 1) if slots else slice(0))


def interpret_piece(
    piece: ProgramPiece, traced_on: torch.device, devices: Sequence[torch.device]
) -> CallableProgram:
    """Returns a program that calls torch's kernels one by one, as the step itself does."""
    assert piece.graph is not None
    changed = copy.deepcopy(piece.graph.graph)
    update_in_place(changed)
    graph = fx.GraphModule(piece.graph, changed)

    def program(device: torch.device) -> Program:
        forward: Any = retarget(graph, traced_on, device).forward

        def call(inputs: list[Any]) -> Sequence[Any]:
            found: Sequence[Any] = forward(*inputs)
            return found

        return call

    programs = {device: program(device) for device in devices}
    return CallableProgram(piece, programs, is_raw=False, graph=changed)


def compile_piece(
    piece: ProgramPiece,
    mode: Any,
    traced_on: torch.device,
    devices: Sequence[torch.device],
    guarded: Collection[int] = (),
) -> CallableProgram:
    """Returns a compiled program: C++ on the CPU, Triton's kernels on GPUs.

    Kernels name their device; those of a second device come from the compiler's cache.

    Args:
        guarded: the slots of inputs that the program need not check for size and strides.
    """
    assert piece.graph is not None
    graph = fx.GraphModule(piece.graph, fx.Graph())
    copied = fx.Graph()
    result = copied.graph_copy(piece.graph.graph, {}, True)
    assert result is not None
    copied.output(result[0] if isinstance(result, tuple) else result)
    graph.graph = copied
    unchecked = [i for i, slot in enumerate(piece.reads) if slot in guarded]

    def program(device: torch.device) -> Program:
        own = retarget_with_fakes(graph, mode, traced_on, device)
        _draw_by_kernel(own)
        if device.type == "cpu":
            sum_small_products(own)
        fakes = [node.meta["val"] for node in own.graph.nodes if node.op == "placeholder"]
        return compile_with_inductor(own, mode, fakes, unchecked)

    # The first device last: ``_draw_by_kernel`` changes its graph in place.
    programs = {device: program(device) for device in reversed(devices)}
    return CallableProgram(piece, programs, is_raw=True)


def scatters_into_images(piece: ProgramPiece) -> bool:
    """Returns whether a piece adds into images at positions: the backward of interpolation does.

    Inductor of torch 2.13 adds wrong numbers on the CPU where several such additions are in one
    program with a dynamic batch size. Torch's kernels are right.
    """
    assert piece.graph is not None
    names = ("aten.index_put.default", "aten.index_put_.default", "aten._unsafe_index_put.default")
    return any(
        str(node.target) in names and node.args[1][0] is None and node.args[3:] == (True,)
        for node in piece.graph.graph.nodes
    )


def _draw_by_kernel(graph: fx.GraphModule) -> None:
    """Replaces draws by inductor's own, which its kernels fuse with the use of the numbers."""
    prims = torch.ops.prims
    for node in list(graph.graph.nodes):
        if str(node.target) != DRAW:
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


def sum_small_products(graph: fx.GraphModule) -> None:
    """Replaces small matrix products by sums, which inductor fuses with other operations.

    A call of a product takes one or two microseconds; a kernel multiplies 1000 numbers in them.
    """
    aten = torch.ops.aten

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.graph.call_function(target, args)
        node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    for node in list(graph.graph.nodes):
        name = str(node.target)
        if name not in ("aten.mm.default", "aten.addmm.default") or node.kwargs:
            continue
        *bias, left, right = node.args
        is_exact = node.meta["val"].dtype in (torch.float32, torch.float64)
        if not is_exact or estimate_work([node]) > SMALL_PRODUCT:
            continue
        with graph.graph.inserting_before(node):
            rows, columns = (
                call(aten.unsqueeze.default, left, 2),
                call(aten.unsqueeze.default, right, 0),
            )
            found = call(aten.sum.dim_IntList, call(aten.mul.Tensor, rows, columns), [1])
            if bias:
                found = call(aten.add.Tensor, found, bias[0])
        found.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(found)
        graph.graph.erase_node(node)
    graph.recompile()


def retarget(
    graph: fx.GraphModule, traced_on: torch.device, device: torch.device
) -> fx.GraphModule:
    """Returns a graph that creates tensors on ``device`` instead of ``traced_on``."""
    if device == traced_on:
        return graph

    def move(argument: Any) -> Any:
        is_device = isinstance(argument, torch.device) and argument.type == traced_on.type
        return device if is_device and argument.index in (None, traced_on.index) else argument

    own = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in own.graph.nodes:
        if node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, move)
            node.kwargs = fx.node.map_aggregate(node.kwargs, move)
    own.recompile()
    return own


def retarget_with_fakes(
    graph: fx.GraphModule, mode: Any, traced_on: torch.device, device: torch.device
) -> fx.GraphModule:
    """Returns the same, with a fake value for every node: a compiler reads its device."""
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

    return trace_graph(function, mode, there)
