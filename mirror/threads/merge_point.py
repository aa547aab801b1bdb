"""Failure: why a run of replicas has failed, and which of them is to blame.

MergePoint: where replicas meet, and what unwinds those who wait in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mirror.errors import DivergenceError
from mirror.threads.user_frames import annotate_error


class Failure:
    """The first cause: what unwinding raises after it tells nothing.

    Attributes:
        error: what a task, or the wait for one, has raised; ``None`` while all is well.
        replica_id: whose task that was, if it was one's.
    """

    # Of the class, and no __init__: one is made for every run.
    error: BaseException | None = None
    replica_id: int | None = None

    def record(self, error: BaseException, replica_id: int | None) -> None:
        """Notes what a replica's task has raised, or the wait for it."""
        if self.error is None:
            self.error, self.replica_id = error, replica_id

    def blame(self, cause: BaseException | None, replica_id: int) -> None:
        """An exception whose handling met a divergence caused it, and goes before it."""
        is_unblamed = isinstance(self.error, DivergenceError) and self.replica_id is None
        if is_unblamed and cause is not None and not isinstance(cause, RunCancelled):
            self.error, self.replica_id = cause, replica_id

    def throw(self, names: Sequence[str]) -> NoReturn:
        """Raises the error, with a note that names the replica; keeps nothing of it."""
        error, self.error = self.error, None
        assert error is not None
        if self.replica_id is not None:
            annotate_error(error, names[self.replica_id])
        try:
            raise error
        finally:
            del error


Payloads = dict[int, Any]  # by replica id
Action = Callable[[Payloads], Payloads]
Act = Callable[[Action, Payloads], Payloads]


@dataclass(slots=True)
class MergePoint:
    """Where replicas meet.

    Attributes:
        operation: its name in messages, ``"all_reduce(sum)"``.
        signature: what must be equal on all replicas.
        payload: this replica's contribution.
        action: called once with all payloads by replica id; returns each replica's result.
        detail: what messages say of it, shapes and the like.
        is_loose: whether those who come meet without those who do not. See [Note: Loose points].
    """

    operation: str
    signature: Hashable
    payload: Any
    action: Action
    detail: str = ""
    is_loose: bool = False

    def __str__(self) -> str:
        return f"{self.operation} of {self.detail}" if self.detail else self.operation


@dataclass(slots=True)
class MergeError:
    """The result of a merge whose action raised."""

    error: BaseException


class RunCancelled(BaseException):
    """Unwinds a replica whose run has failed elsewhere; never reaches the user."""


def just_act(action: Action, payloads: Payloads) -> Payloads:
    """Runs the action of a merge point, as it is."""
    return action(payloads)


def act_at(points: Mapping[int, MergePoint], met: Sequence[int], act: Act) -> Payloads:
    """Runs the action of replicas that stand at one point, by ``act``; what it raises is all's."""
    payloads = {r: points[r].payload for r in met}
    try:
        return act(points[met[0]].action, payloads)
    except BaseException as error:
        return dict.fromkeys(payloads, MergeError(error))
