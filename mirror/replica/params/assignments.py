"""What replicas assign to variables inside ``run``: it must be the same on all that take part.

[Note: Assigned]
``p.requires_grad_(False)`` and ``p.data = tensor`` inside ``run`` act on the replica's own copy. A
training step that freezes for a while, or sets the values aside and back, does so on every
replica. What one replica alone assigns would make one model several. So a run notes what was
assigned, and compares:

    requires_grad    where the replicas merge, and when the run ends
    values           when the run ends, bit for bit, of those variables whose ``.data`` was set

Writes in place are not noted: ``check_replicas`` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping

from mirror.errors import StrategyError
from mirror.execution.lifecycle import LifecycleHooks
from mirror.execution.run_state import Run
from mirror.replica.params.bitwise import same_bits
from mirror.replica.params.replicated_param import ReplicatedParam

Assigned = Mapping[ReplicatedParam, bool]  # and whether it was given values


def assigned_part() -> LifecycleHooks:
    """Returns what looks at the assignments of a run. See [Note: Assigned]."""
    return LifecycleHooks(
        name="assigned",
        on_merge=lambda run: refuse_unlike_flags(run.assigned, run),
        finish=_finish,
    )


def _finish(run: Run) -> None:
    if run.assigned:
        assigned, run.assigned = run.assigned, {}
        refuse_unlike_flags(assigned, run)
        refuse_unlike_values(assigned, run)


def refuse_unlike_flags(assigned: Assigned, run: Run) -> None:
    """Raises StrategyError if replicas of a run have left ``requires_grad`` different."""
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


def refuse_unlike_values(assigned: Assigned, run: Run) -> None:
    """Raises StrategyError if ``p.data = ...`` has left a variable different on replicas."""
    first, *others = run.active
    for variable, has_values in assigned.items():
        for r in others if has_values else ():
            if not same_bits(variable.targets[first], variable.targets[r]):
                raise StrategyError(
                    f"the .data of parameter {variable.name!r} was assigned inside strategy.run, "
                    f"and replica {r} has other values now than replica {first}; assign it "
                    "outside strategy.run, or the same values on every replica (a random tensor "
                    "is each replica's own)"
                )
