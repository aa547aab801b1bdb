"""The plan of a step: its programs by level, its collective points, and its work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx


@dataclass(eq=False, slots=True)
class ProgramPiece:
    """A program of a level.

    Attributes:
        is_own: whether it runs on every replica, or else once on every device.
        graph: takes ``reads`` and returns ``gives``. ``None`` if the compiled program comes from
            the disk.
        reads: slots of its inputs.
        gives: slots of its outputs.
        writes: slots of the inputs that it changes.
        work: its approximate number of multiplications.
    """

    is_own: bool
    graph: fx.GraphModule | None
    reads: list[int]
    gives: list[int]
    writes: list[int]
    work: float = 0.0


@dataclass(eq=False, slots=True)
class PlanLevel:
    """The programs between two collective points, and the points after them.

    Attributes:
        collectives: for each, its number, the slots of its inputs, the slots of its results.
    """

    shared: ProgramPiece | None = None
    own: ProgramPiece | None = None
    collectives: list[tuple[int, list[int], list[int]]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class StepPlan:
    """All programs of a step.

    Attributes:
        num_slots: the number of values; the first ones are the inputs.
        results: slots of the values that the step returns or leaves.
        written: slots of the inputs that it changes.
        packings: for each collective point, the ``packing`` of its CollectivePoint.
    """

    levels: list[PlanLevel]
    num_slots: int
    results: list[int]
    written: list[int]
    packings: list[list[tuple[int, int, tuple[int, ...]]]]


# The cost of an output element of any operation other than a product, in multiplications: 0.3 ns
# of one core.
_PER_ELEMENT = 12.0
# 5 ms of one core: more than the host's share of a step that launches hundreds of kernels.
_MUCH_WORK = 2e8


def estimate_work(nodes: Iterable[fx.Node]) -> float:
    """Returns the approximate work of a graph, in multiplications of matrix products."""
    total = 0.0
    for node in nodes:
        counted: Callable[..., float] | None = _COUNTED.get(str(node.target))
        if counted is not None:
            total += counted(*[_shape(arg) for arg in node.args], out=_shape(node))
        elif node.op == "call_function":
            total += _PER_ELEMENT * math.prod(_shape(node))
    return total


def is_mostly_convolutions(nodes: Iterable[fx.Node]) -> bool:
    """Whether a step spends most of its time in large convolutions.

    On the CPU inductor gains nothing there: it calls the same kernels for them, with copies to
    other layouts, and compiles the rest of such a network for minutes.
    """
    nodes = list(nodes)
    total = estimate_work(nodes)
    convolutions = estimate_work(node for node in nodes if "convolution" in str(node.target))
    return total >= _MUCH_WORK and convolutions > total / 2


def _shape(value: Any) -> list[int]:
    fake = getattr(value, "meta", {}).get("val")
    if not isinstance(fake, torch.Tensor):
        return []
    return [int(getattr(getattr(s, "node", None), "hint", s)) for s in fake.shape]


def _product(*shapes: list[int], out: list[int]) -> float:
    return math.prod(out) * float(shapes[-2][-1] if len(shapes) > 1 else 1)


def _convolution(x: list[int], weight: list[int], *rest: Any, out: list[int]) -> float:
    return math.prod(out) * float(math.prod(weight[1:]))


def _convolution_backward(
    grad: list[int], x: list[int], weight: list[int], *rest: Any, out: list[int]
) -> float:
    return 2 * math.prod(grad) * float(math.prod(weight[1:]))


def _attention(q: list[int], k: list[int], *rest: Any, out: list[int]) -> float:
    return 2.0 * math.prod(q) * k[-2]


_COUNTED: dict[str, Callable[..., float]] = {
    "aten.mm.default": lambda a, b, out: _product(a, b, out=out),
    "aten.addmm.default": lambda c, a, b, *rest, out: _product(a, b, out=out),
    "aten.bmm.default": lambda a, b, out: _product(a, b, out=out),
    "aten.baddbmm.default": lambda c, a, b, *rest, out: _product(a, b, out=out),
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
}
