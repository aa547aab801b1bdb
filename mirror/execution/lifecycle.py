"""Lifecycle hooks: the parts of a strategy keep its replicas equal between runs.

``StepEnds`` detects the end of each training step, and notifies listeners.

[Note: Parts]
A part keeps one kind of state equal on all replicas between runs. The runner calls the parts'
hooks at each event, in the order of the rows:

    part         prepare            on_return,      on_run_end  sync_idle    on_       recover
                                    finish                                   synced
    modules      mirror recorded    refuse swapped                                     drop
                 modules            parameters                                         swaps
    first        with workers: take
    values       those of worker 0
    attributes                      join values of                                     drop
                                    the replicas
    assigned                        refuse unequal
                                    values (also
                                    on_merge)
    plain        record that the    warn about
                 strategy is used   models created
                                    in run
    optimizers   recover if a step  refuse unequal              copy state             swap out,
                 has raised         options                                            follow the
                                                                                       first
    gradients    reduce or defer    reduce or                                          discard
                 the rest           defer the rest
    collectives                     advance
                                    sequence
                                    numbers
    variables    broadcast changed                              broadcast    mark as   broadcast
                 values                                                      synced
    reduced      broadcast those                                broadcast              broadcast
    gradients    that the program
                 has read
    buffers      broadcast written                  mark as     take value             (failed:
                 values                             changed     of active              value of
                                                                replicas               replicas
                                                                                       that began)

    prepare      before a run, an optimizer step in the cross-replica context, an unsplit call
    on_merge     all replicas wait at a merge point, and some have set a mode or a variable
    on_return    all replicas have returned
    finish       after that, or when all replicas are in merge_call
    on_run_end   the replicas may have changed something; also after a failure
    sync_idle    idle replicas get the state of the first active one
    on_synced    all replicas are equal
    recover      after a failure: all replicas get the state of the first one
    on_run_failed  after that, if it was a run: some replicas may not have begun it

A strategy of one replica has only the modules' part. A recomputation in a backward pass outside
``run``, or in a custom function, is a ``Run`` without events.

[Note: Ends of steps]
A step ends when an outermost run returns in which optimizers have stepped, or when an optimizer's
step returns outside any run (in the cross-replica context, or without a strategy). ``apply`` of a
Keras optimizer is a step, too. An optimizer step inside another optimizer's step belongs to the
outer one. A run without an optimizer step, such as an evaluation, ends no step.

The strategy's timeline is notified first, and through it ``EveryNSteps``; then the listeners,
which get the steps of all strategies, and those without a strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from mirror.base.dynamo import disable_dynamo
from mirror.base.timeline import Timeline
from mirror.execution.run import Run, current, enclosing_replica


def do_nothing(*args: object) -> None:
    """Does nothing; the default hook."""


class WhilePending(NamedTuple):
    """A hook that is called only while its part has work for it: an idle part costs no call.

    Attributes:
        work: a container of the part, always the same object; an empty one has no work.
        hook: the hook.
    """

    work: Collection[Any]
    hook: Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class LifecycleHooks:
    """The hooks of one part, which keeps one kind of state equal on all replicas.

    See [Note: Parts] for when each hook is called.
    """

    name: str
    prepare: Callable[[], None] | WhilePending | tuple[WhilePending, ...] = do_nothing
    on_merge: Callable[[Run], None] = do_nothing
    on_return: Callable[[], None] | WhilePending = do_nothing
    finish: Callable[[Run], None] | WhilePending | tuple[WhilePending, ...] = do_nothing
    on_run_end: Callable[[tuple[int, ...]], None] | WhilePending = do_nothing
    sync_idle: Callable[[int, Sequence[int]], None] = do_nothing
    on_synced: Callable[[], None] = do_nothing
    recover: Callable[[], None] = do_nothing
    on_run_failed: Callable[[tuple[int, ...]], None] = do_nothing


class GoesAlone(Protocol):
    """A backward pass outside ``run`` in the replicas' threads."""

    def go_alone(self) -> bool:
        """Waits until the other replicas have stopped; returns False in any other thread."""


class AllLifecycleHooks:
    """The hooks of all parts of one strategy, in their order. See [Note: Parts].

    Attributes:
        at_merging: the ``on_merge`` hooks.
    """

    def __init__(self, num_replicas: int, parts: Sequence[LifecycleHooks]) -> None:
        self._num_replicas = num_replicas

        def hooks_for(event: str) -> tuple[Callable[..., None], ...]:
            hooks = (getattr(part, event) for part in parts)
            return tuple(hook for hook in hooks if hook is not do_nothing)

        def pending_for(event: str) -> tuple[WhilePending, ...]:
            found = list[WhilePending]()
            for part in parts:
                hook: Any = getattr(part, event)
                if type(hook) is tuple:
                    found += hook
                elif hook is not do_nothing:
                    is_pending = isinstance(hook, WhilePending)
                    found.append(hook if is_pending else WhilePending((True,), hook))
            return tuple(found)

        self._prepare_hooks, self._return_hooks = pending_for("prepare"), pending_for("on_return")
        self._finish_hooks, self._run_end_hooks = pending_for("finish"), pending_for("on_run_end")
        self._sync_hooks, self._synced_hooks = hooks_for("sync_idle"), hooks_for("on_synced")
        self._recover_hooks, self.at_merging = hooks_for("recover"), hooks_for("on_merge")
        self._failed_hooks = hooks_for("on_run_failed")

    def prepare(self) -> None:
        """Copies changes of the cross-replica context to all replicas."""
        if torch.is_inference_mode_enabled():
            # Tensors created here, state included, outlive the caller's inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self.prepare()
            return
        for work, prepare in self._prepare_hooks:
            if work:
                prepare()

    def recover(self) -> None:
        """Restores all replicas to the first one's state after a failure."""
        for recover in self._recover_hooks:
            recover()

    def on_run_failed(self, run: Run) -> None:
        """Reports which replicas had begun a run that failed, if any had."""
        begun = tuple(r for r in run.active if run.members[r].has_begun)
        if begun:
            for on_run_failed in self._failed_hooks:
                on_run_failed(begun)

    def finish(self, run: Run, *, has_returned: bool = True) -> None:
        """Ends a run, or the part of it before merge_call: combines or rejects local changes.

        Args:
            has_returned: whether the replicas have returned, rather than reached a merge_call.
        """
        for work, on_return in self._return_hooks if has_returned else ():
            if work:
                on_return()
        if run.modes:
            run.check_modes()
        for work, finish in self._finish_hooks:
            if work:
                finish(run)

    def on_run_end(self, run: Run) -> None:
        """Reports the replicas that may have changed something."""
        for work, on_run_end in self._run_end_hooks:
            if work:
                on_run_end(run.active)

    def sync_idle(self, run: Run) -> None:
        """Copies the state of an active replica to the idle ones; then all count as equal."""
        if len(run.active) < self._num_replicas:
            idle = [r for r in range(self._num_replicas) if r not in run.active]
            with torch.inference_mode(False), torch.no_grad():
                for sync_idle in self._sync_hooks:
                    sync_idle(run.active[0], idle)
        for on_synced in self._synced_hooks:
            on_synced()


class StepEnds:
    """Notifies listeners of the ends of steps. See [Note: Ends of steps].

    Attributes:
        before_optimizer: called with an optimizer before its step, unless the step is part of
            another one's; inside ``run`` by each replica.
        listeners: called after each step of any strategy; they may raise, also SystemExit.
    """

    def __init__(self) -> None:
        self.before_optimizer: list[Callable[[Any], None]] = []
        self.listeners: list[Callable[[], None]] = []

    @disable_dynamo
    def record_optimizer_step(self, timeline: Timeline | None) -> None:
        """Records that an optimizer's step has returned in the calling thread.

        Args:
            timeline: the timeline of the step's strategy, if any.
        """
        replica = current.replica or enclosing_replica()
        if replica is None:
            self.notify(timeline)
            return
        run: Any = replica.run
        while run.outer is not None:
            run = run.outer
        run.has_stepped = True

    def notify(self, timeline: Timeline | None) -> None:
        """Notifies the timeline and the listeners of the end of a step."""
        if timeline is not None:
            timeline.end_step()
        for listener in tuple(self.listeners):
            listener()


step_ends = StepEnds()
