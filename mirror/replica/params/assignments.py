"""Assignments to variables inside ``run``, which must be the same on all replicas.

``p.requires_grad_(False)`` and ``p.data = tensor`` inside ``run`` act on the replica's own copy. A
training step that freezes parameters for a while, or replaces and restores their values, does so
on every replica. If only one replica assigned, the replicas would diverge. So a run records
assignments, and compares:

    requires_grad    at merge points, and when the run ends
    values           when the run ends, bit for bit, of the variables whose ``.data`` was set

In-place writes are not recorded; ``check_replicas`` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping

from mirror.errors import StrategyError
from mirror.execution.lifecycle import LifecycleHooks
from mirror.execution.run_state import Run
from mirror.replica.params.bitwise import same_bits
from mirror.replica.params.replicated_param import ReplicatedParam

Assigned = Mapping[ReplicatedParam, bool]  # the value: whether ``.data`` was assigned


def assigned_part() -> LifecycleHooks:
    """Returns the hooks that compare the assignments of a run."""
    return LifecycleHooks(
        name="assigned",
        on_merge=lambda run: refuse_unequal_flags(run.assigned, run),
        finish=_finish,
    )


def _finish(run: Run) -> None:
    if run.assigned:
        assigned, run.assigned = run.assigned, {}
        refuse_unequal_flags(assigned, run)
        refuse_unequal_values(assigned, run)


def refuse_unequal_flags(assigned: Assigned, run: Run) -> None:
    """Raises StrategyError if ``requires_grad`` of a variable differs between replicas."""
    first, *others = run.active
    for variable in assigned:
        expected = variable.copies[first].requires_grad
        for r in others:
            if variable.copies[r].requires_grad != expected:
                raise StrategyError(
                    f"requires_grad of parameter {variable.name!r} was set to {expected} on "
                    f"replica {first} and {not expected} on replica {r}, but a parameter is one "
                    "for all replicas; freeze and unfreeze it outside strategy.run, or on every "
                    "replica"
                )


def refuse_unequal_values(assigned: Assigned, run: Run) -> None:
    """Raises StrategyError if ``p.data = ...`` has set different values on replicas."""
    first, *others = run.active
    for variable, has_values in assigned.items():
        for r in others if has_values else ():
            if not same_bits(variable.targets[first], variable.targets[r]):
                raise StrategyError(
                    f"the .data of parameter {variable.name!r} was assigned inside strategy.run, "
                    f"and replica {r} has other values now than replica {first}; assign it "
                    "outside strategy.run, or the same values on every replica (random tensors "
                    "differ between replicas)"
                )
