"""What a step is cut into: programs, by the level at which they run, and meetings between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx


@dataclass(eq=False, slots=True)
class ProgramPiece:
    """A program of a level.

    Attributes:
        is_own: whether every replica runs it; else every device.
        graph: called with ``reads``; returns ``gives``. ``None`` where what was compiled of it
            comes from the disk.
        reads: slots of what it takes.
        gives: slots of what it returns.
        writes: which of ``reads`` it changes.
        work: about how much it has to do, in multiplications.
    """

    is_own: bool
    graph: fx.GraphModule | None
    reads: list[int]
    gives: list[int]
    writes: list[int]
    work: float = 0.0


@dataclass(eq=False, slots=True)
class PlanLevel:
    """What happens between two meetings.

    Attributes:
        meetings: number, slots of what each replica brings, slots of the results.
    """

    shared: ProgramPiece | None = None
    own: ProgramPiece | None = None
    meetings: list[tuple[int, list[int], list[int]]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class StepPlan:
    """A step, cut.

    Attributes:
        num_slots: how many values there are; the first ones are the inputs.
        results: slots of what the graph returned.
        written: slots of the inputs that it changes.
        lies: of each meeting of gradients, where each lies in what is brought. See ``Meeting``.
    """

    levels: list[PlanLevel]
    num_slots: int
    results: list[int]
    written: list[int]
    lies: list[list[tuple[int, int, tuple[int, ...]]]]
