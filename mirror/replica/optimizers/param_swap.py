"""Loan: an optimizer, shared by all replicas, in the hands of one.

[Note: Lending an optimizer]
An optimizer holds the mirrored parameters; a step needs one replica's. Before a step torch calls
the global pre-hook, which lends the optimizer to a replica: ``param_groups`` and ``state`` become
that replica's, over ordinary parameters; the post-hook gives it back. In between it belongs to
this replica alone. A step that raises is given back at once; inside ``run`` at the replica's next
merge or return, or when its next step begins.

Options in ``param_groups`` are shared: every replica gets a copy before the step, and what the
first one's step, or a hook of it, writes into its copy is kept. The first replica's state is the
optimizer's own.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from mirror.base.at_fork import reinit_after_fork
from mirror.execution.current_replica import current
from mirror.execution.replicas import SwappedOptimizer
from mirror.replica.optimizers.group_options import keep_options
from mirror.replica.optimizers.optimizer_state import ReplicaStates
from mirror.replica.optimizers.param_groups import ParamGroupsView
from mirror.threads.merge_point import RunCancelled

HEARING_SECONDS = 0.05
NO_REPLICA = -1  # who is lent no parameter groups


class ParamGroupSwap:
    """One optimizer's groups and state, one replica's at a time. See [Note: Lending...].

    Args:
        lent: where it notes itself while a replica has the optimizer.

    Attributes:
        parameters: what the groups held when last looked at.
        groups: the optimizer's own, whoever has it.
        step: torch's call that the step in progress is.
        is_begun: whether a step of the first replica's is in progress; after one that raised,
            parameters and state may be partly updated.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        states: ReplicaStates,
        num_replicas: int,
        lent: set[SwappedOptimizer],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._states = states
        self._lent = lent
        self.parameters = ParamGroupsView(())
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        self._of_replicas: list[list[dict[str, Any]]] = [[] for _ in range(num_replicas)]
        self._to: int | None = None
        self._alone = threading.Lock()  # held while lent
        self.step: FrameType | None = None
        self.is_begun = False
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Takes the optimizer back in a forked process, where no replica has it."""
        self._alone = threading.Lock()
        if self._to is not None:
            self._alone.acquire()
            self.swap_out()

    def refresh(self, *, only_first: bool = False, is_whole: bool = False) -> None:
        """Brings the replicas' groups and state in line with the optimizer's own.

        Args:
            only_first: whether those of the first replica will do.
            is_whole: whether the step is to run on the mirrored parameters, unlent.
        """
        optimizer = self.optimizer
        self.groups = optimizer.param_groups
        if not self.parameters.are_in(self.groups):
            self.parameters = ParamGroupsView(self.groups)
        for r in range(1 if only_first else len(self._of_replicas)):
            self._of_replicas[r] = self.parameters.groups_of(r, self.groups)
        self._states.read(optimizer, is_whole=is_whole)
        if not only_first:
            self._states.catch_up()  # before the first one steps

    def swap_in(self, replica_id: int, step: FrameType) -> None:
        """Gives the optimizer to a replica for a step; waits until nobody else has it."""
        self._hand_over(replica_id, self._of_replicas[replica_id], step)

    def swap_in_nothing(self, step: FrameType) -> None:
        """Lends no groups, for the steps of those who have been stepped."""
        self._hand_over(NO_REPLICA, [], step)

    def _hand_over(self, replica_id: int, groups: list[dict[str, Any]], step: FrameType) -> None:
        state = {} if replica_id == NO_REPLICA else self._states.state_of(replica_id)
        alone = self._alone
        while not alone.acquire(timeout=HEARING_SECONDS):
            # Who has it may have failed, and not have given it back.
            if current.replica is not None:
                current.replica.run.lockstep.check_going_on()
        if alone is not self._alone:
            raise RunCancelled
        optimizer = self.optimizer
        self.step, self._to = step, replica_id
        self.is_begun |= replica_id == 0
        self._lent.add(self)
        optimizer.param_groups = groups
        optimizer.state = state  # type: ignore[assignment]

    def swap_out(self) -> None:
        """Puts the shared groups and state back; idempotent."""
        optimizer = self._optimizer()
        self.step = None
        if self._to is None or optimizer is None:
            self._to = None
            self._lent.discard(self)
            return
        if self._to == 0:
            keep_options(self.groups, self._of_replicas[0])
            self._states.publish_first()
        optimizer.param_groups = self.groups
        optimizer.state = self._states.shared
        self._lent.discard(self)
        self._to = None  # last: until then an interrupt leaves it all to be done again
        self._alone.release()

    def force_out(self) -> None:
        """Ends the loan, whoever has it or waits for it, after a failure; idempotent."""
        self.swap_out()
        alone, self._alone = self._alone, threading.Lock()
        with suppress(RuntimeError):  # it was not lent
            alone.release()  # who waits for it finds another one

    @property
    def is_swapped_in(self) -> bool:
        """Whether a step has the optimizer, or had it and raised."""
        return self._to is not None

    def is_within_step(self, frame: FrameType) -> bool:
        """Whether ``frame`` was called by the step in progress."""
        caller: FrameType | None = frame if self.step is not None else None
        while caller is not None and caller is not self.step:
            caller = caller.f_back
        return caller is not None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, of which somebody who calls a method of it has hold."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer
