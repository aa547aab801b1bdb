"""ParamGroupSwap: an optimizer that all replicas share, with one replica's parameters swapped in.

[Note: Lending an optimizer]
Problem: an optimizer holds the mirrored parameters; its step needs one replica's.
Rule: for a step, ``param_groups`` and ``state`` become those of one replica, over ordinary
parameters; afterwards the shared ones return. In between only this replica uses the optimizer. A
step that raises ends the same way. If an interrupt hits that, the replica's next merge, its return
or its next step ends it.
Options: ``param_groups`` are shared, so every replica gets a copy of their options before its
step. What the first replica's step, or a hook of it, writes into its copy is kept. The first
replica's state is the optimizer's own.
At once: replicas that run at once each step a clone, an object of the same class with its groups
and state, while the optimizer itself has none. So no replica waits for another one's step.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
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
NO_REPLICA = -1  # swaps in no parameter groups
ALL_REPLICAS = -2  # every replica steps a clone of the optimizer


class ParamGroupSwap:
    """One optimizer's groups and state, swapped for one replica's at a time.

    See [Note: Lending an optimizer].

    Args:
        lent: contains this object while a replica uses the optimizer.

    Attributes:
        parameters: the contents of the groups at the last step.
        groups: the optimizer's own groups, also while others are swapped in.
        is_begun: whether a step of the first replica is in progress. If it raises, parameters
            and state may be partly updated.
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
        self._no_groups: list[dict[str, Any]] = []  # what ``NO_REPLICA`` swaps in
        self._clones: list[Any] = []  # while all replicas step at once
        self._to: int | None = None
        self._alone = threading.Lock()  # held while lent
        self.is_begun = False
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Swaps out in a forked process, where no replica runs."""
        self._alone = threading.Lock()
        if self._to is not None:
            self._alone.acquire()
            self.swap_out()

    def refresh(self, *, only_first: bool = False, is_whole: bool = False) -> None:
        """Updates the replicas' groups and state from the optimizer's own.

        Args:
            only_first: whether only the first replica's are needed.
            is_whole: whether the step runs on the mirrored parameters, without a swap.
        """
        optimizer = self._optimizer()
        assert optimizer is not None  # the caller keeps it alive
        self.groups = optimizer.param_groups
        if not self.parameters.are_in(self.groups):
            self.parameters = ParamGroupsView(self.groups)
        for r in range(1 if only_first else len(self._of_replicas)):
            self._of_replicas[r] = self.parameters.groups_of(r, self.groups)
        self._states.read(optimizer, is_whole=is_whole)
        if not only_first:
            self._states.catch_up()  # before the first one steps

    def swap_in(self, replica_id: int) -> None:
        """Swaps in a replica's groups and state; waits until no other replica has the optimizer.

        Args:
            replica_id: ``NO_REPLICA`` swaps in no groups, for the step of a replica with
                parameters that have been updated already.
        """
        groups, state = self._no_groups, dict[Any, Any]()
        if replica_id != NO_REPLICA:
            groups, state = self._of_replicas[replica_id], self._states.state_of(replica_id)
        alone = self._alone
        while not alone.acquire(timeout=HEARING_SECONDS):
            # The replica that uses it may have failed.
            if current.replica is not None:
                current.replica.run.lockstep.check_going_on()
        if alone is not self._alone:
            raise RunCancelled
        optimizer = self._optimizer()
        assert optimizer is not None  # the caller keeps it alive
        self._to = replica_id
        self.is_begun |= replica_id == 0
        self._lent.add(self)
        optimizer.param_groups = groups
        optimizer.state = state  # type: ignore[assignment]

    def swap_in_all(self) -> None:
        """Makes a clone for every replica, in a merge; ``swap_out`` in a later one ends that."""
        self._alone.acquire()
        optimizer = self._optimizer()
        assert optimizer is not None  # the caller keeps it alive
        self._to, self.is_begun = ALL_REPLICAS, True
        self._lent.add(self)
        for r, groups in enumerate(self._of_replicas):
            clone = object.__new__(type(optimizer))
            vars(clone).update(vars(optimizer))
            clone.param_groups, clone.state = groups, self._states.state_of(r)  # type: ignore[assignment]
            self._clones.append(clone)
        optimizer.param_groups = self._no_groups
        optimizer.state = {}  # type: ignore[assignment]

    def clone_of(self, replica_id: int) -> Optimizer:
        """Returns the clone that a replica steps."""
        clone: Optimizer = self._clones[replica_id]
        return clone

    def swap_out(self) -> None:
        """Puts the shared groups and state back; idempotent."""
        optimizer = self._optimizer()
        if self._to is None or optimizer is None:
            self._to = None
            self._lent.discard(self)
            return
        if self._to in (0, ALL_REPLICAS):
            keep_options(self.groups, self._of_replicas[0])
            self._states.publish_first()
        optimizer.param_groups = self.groups
        optimizer.state = self._states.shared
        self._clones = []
        self._lent.discard(self)
        self._to = None  # last: after an interrupt before this line, all of it is repeated
        self._alone.release()

    def force_out(self) -> None:
        """Swaps out after a failure, whichever replica uses it or waits for it; idempotent."""
        self.swap_out()
        alone, self._alone = self._alone, threading.Lock()
        with suppress(RuntimeError):  # it was not swapped in
            alone.release()  # a waiting thread then finds that there is a new lock

    @property
    def is_swapped_in(self) -> bool:
        """Whether a replica's groups are swapped in, by a step in progress or interrupted."""
        return self._to is not None
