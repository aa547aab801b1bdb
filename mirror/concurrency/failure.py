"""Failure: why a run of replicas has failed, and which of them is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from mirror.concurrency.merge_point import RunCancelled
from mirror.concurrency.stack import annotate_error
from mirror.errors import DivergenceError


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
