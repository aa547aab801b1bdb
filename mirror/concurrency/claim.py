"""Claim: what one thread at a time has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from mirror.concurrency.stack import calls
from mirror.errors import StrategyError

T = TypeVar("T")


class Claim:
    """The right of one thread to run the replicas of a strategy."""

    def __init__(self) -> None:
        self._claims: dict[str, int] = {}

    def call(self, run: Callable[[], T]) -> T:
        """Calls ``run`` unless another thread's call is going on.

        Raises:
            StrategyError: it is.
        """
        thread = threading.get_ident()
        claims = self._claims
        try:
            # One step, whoever comes at the same moment. A claim of its own an interrupt has left.
            claimed = claims.setdefault("run", thread)
            if claimed != thread:
                if self in calls(claimed, Claim.call):
                    raise StrategyError(
                        "run was called while another thread's run of the same strategy is going "
                        "on; call it when that has returned, or give each thread a strategy of "
                        "its own"
                    )
                claims["run"] = thread  # so it has left that, too
            return run()
        finally:
            if claims.get("run") == thread:
                claims.clear()
