"""Merge points, where all replicas of a run must meet, and the first failure of a run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mirror.errors import DivergenceError
from mirror.threads.user_frames import annotate_error


class Failure:
    """The first error of a run. Errors that follow while replicas unwind are ignored.

    Attributes:
        error: the error of a task, or of the wait for one; ``None`` if there is none.
        replica_id: the replica of that task; ``None`` if the error belongs to no replica.
    """

    # Class attributes and no __init__: every run makes one, and this is faster.
    error: BaseException | None = None
    replica_id: int | None = None

    def record(self, error: BaseException, replica_id: int | None) -> None:
        """Stores the error of a replica's task, or of the wait for it, if it is the first."""
        if self.error is None:
            self.error, self.replica_id = error, replica_id

    def blame(self, cause: BaseException | None, replica_id: int) -> None:
        """Replaces a divergence by the exception that the replica was handling: that caused it."""
        is_unblamed = isinstance(self.error, DivergenceError) and self.replica_id is None
        if is_unblamed and cause is not None and not isinstance(cause, RunCancelled):
            self.error, self.replica_id = cause, replica_id

    def throw(self, names: Sequence[str]) -> NoReturn:
        """Raises the error, with a note that names the replica, and drops the reference to it."""
        error, self.error = self.error, None
        assert error is not None
        if self.replica_id is not None:
            annotate_error(error, names[self.replica_id])
        try:
            raise error
        finally:
            del error


Tasks = dict[int, Callable[[], Any]]  # by replica id
Payloads = dict[int, Any]  # by replica id
Action = Callable[[Payloads], Payloads]
Act = Callable[[Action, Payloads], Payloads]


@dataclass(slots=True)
class MergePoint:
    """One replica's arrival at a point where replicas must meet.

    Attributes:
        operation: its name in messages, ``"all_reduce(sum)"``.
        signature: must be equal on all replicas.
        payload: this replica's contribution.
        action: called once with all payloads by replica id; returns each replica's result.
        detail: further text for messages, such as shapes.
        is_partial: whether only some of the replicas need to come: [Note: Partial merge points].
    """

    operation: str
    signature: Hashable
    payload: Any
    action: Action
    detail: str = ""
    is_partial: bool = False

    def __str__(self) -> str:
        return f"{self.operation} of {self.detail}" if self.detail else self.operation


@dataclass(slots=True)
class MergeError:
    """The result of a merge whose action raised."""

    error: BaseException


class RunCancelled(BaseException):
    """Unwinds a replica after another replica of its run has failed; never reaches the user."""


def just_act(action: Action, payloads: Payloads) -> Payloads:
    """Runs the action of a merge point directly."""
    return action(payloads)
