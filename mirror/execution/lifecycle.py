"""Part: something that must be equal on all replicas between runs, and what it is told.

[Note: Parts]
What must be equal on all replicas between runs is kept so by the parts of a strategy. The runner
tells them, in one fixed order, what happens; a row is a part, from the first to the last told:

    part         prepare            returned,       ran         bring_along  settle    recover
                                    finish
    modules      mirror what was    refuse swapped                                     drop
                 recorded           parameters                                         swaps
    first        of several workers
    values       take worker 0's
    attributes                      join what                                          drop
                                    replicas set
    assigned                        refuse unlike
                                    (merging, too)
    plain        note that the      tell of models
                 strategy is used   made in run
    optimizers   recover if a step  refuse unlike               take over              give back,
                 has raised         options                     state                  follow the
                                                                                       first
    gradients    reduce or defer    reduce or                                          discard
                 the rest           defer the rest
    collectives                     lift sequence
                                    numbers
    variables    carry what                                     carry        take as   carry
                 changed                                        values       equal
    reduced      carry those                                    carry                  carry
    gradients    handed out
    buffers      carry what was                     may have    value of                 (failed:
                 written                            changed     those that               value of
                                                                ran                      those that
                                                                                         began)

    prepare      before a run, an optimizer step in the cross-replica context, an unsplit call
    merging      the replicas stand at a merge point, and some have set a mode or a variable
    returned     all replicas have returned
    finish       after that, or when all stand in merge_call
    ran          the replicas may have changed something; after a failure, too
    bring_along  some have sat the run out, and get what the first of the others has
    settle       all replicas have done the same
    recover      after a failure: back to what the first replica has
    failed       after that, if it was a run: some replicas may not have begun it

A strategy of one replica has the modules' part alone. What a backward pass recomputes outside of a
run, or for a custom function, is a ``Run`` of its own that nobody begins or ends: its parts hear
nothing.

Parts: all that a strategy keeps equal, told together what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mirror.execution.run_state import Run


def nothing(*args: object) -> None:
    """What most parts have to do at most events."""


@dataclass(frozen=True, kw_only=True)
class LifecycleHooks:
    """Something that must be equal on all replicas between runs; told when to see to it.

    See [Note: Parts] for when each is called.
    """

    name: str
    prepare: Callable[[], None] = nothing
    on_merge: Callable[[Run], None] = nothing
    on_return: Callable[[], None] = nothing
    finish: Callable[[Run], None] = nothing
    on_run_end: Callable[[tuple[int, ...]], None] = nothing
    sync_idle: Callable[[int, Sequence[int]], None] = nothing
    on_synced: Callable[[], None] = nothing
    recover: Callable[[], None] = nothing
    on_run_failed: Callable[[tuple[int, ...]], None] = nothing


class GoesAlone(Protocol):
    """A backward pass outside ``run`` that the replicas' threads are in."""

    def go_alone(self) -> bool:
        """Waits until the other replicas have stopped; ``False`` in a thread that is of none."""


class AllLifecycleHooks:
    """The parts of one strategy, in their order. See [Note: Parts].

    Attributes:
        at_merging: what looks at a run where its replicas merge.
        at_returned: what hears that all replicas have returned.
    """

    def __init__(self, num_replicas: int, parts: Sequence[LifecycleHooks]) -> None:
        self._num_replicas = num_replicas

        def of(event: str) -> tuple[Callable[..., None], ...]:
            told = (getattr(part, event) for part in parts)
            return tuple(method for method in told if method is not nothing)

        self._at_prepare, self.at_returned = of("prepare"), of("on_return")
        self._at_finish, self._at_ran = of("finish"), of("on_run_end")
        self._at_bring_along, self._at_settle = of("sync_idle"), of("on_synced")
        self._at_recover, self.at_merging = of("recover"), of("on_merge")
        self._at_failed = of("on_run_failed")

    def prepare(self) -> None:
        """Makes all replicas equal to what the cross-replica context left."""
        if torch.is_inference_mode_enabled():
            # What is made here, of state too, outlives the caller's inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self.prepare()
            return
        for prepare in self._at_prepare:
            prepare()

    def recover(self) -> None:
        """Brings all replicas back to the first one's state after something has failed."""
        for recover in self._at_recover:
            recover()

    def on_run_failed(self, run: Run) -> None:
        """Tells which replicas had begun a run that has failed, if any had."""
        begun = tuple(r for r in run.active if run.members[r].has_begun)
        if begun:
            for failed in self._at_failed:
                failed(begun)

    def finish(self, run: Run) -> None:
        """Ends a run, or a stretch of it: what replicas did apart is joined, or refused."""
        if run.modes:
            run.check_modes()
        for finish in self._at_finish:
            finish(run)

    def on_run_end(self, run: Run) -> None:
        """Tells which replicas may have changed something."""
        for ran in self._at_ran:
            ran(run.active)

    def sync_idle(self, run: Run) -> None:
        """Gives replicas that sat a run out what the others have; takes all as equal."""
        idle = [r for r in range(self._num_replicas) if r not in run.active]
        if idle:
            with torch.inference_mode(False), torch.no_grad():
                for bring_along in self._at_bring_along:
                    bring_along(run.active[0], idle)
        for settle in self._at_settle:
            settle()
