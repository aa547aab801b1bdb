"""TerminationConfig: how a platform takes machines away, for PreemptionCheckpointHandler."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mirror.base.migration_hints import call_with_hints
from mirror.errors import short_repr


@call_with_hints
@dataclass(frozen=True)
class TerminationConfig:
    """How a platform announces that it takes a machine away, and how a program exits there.

    ::

        config = mirror.train.TerminationConfig(
            termination_watcher_fn=maintenance_is_announced,
            exit_fn=lambda: sys.exit(143),
            grace_period=3600,
        )
        with mirror.PreemptionCheckpointHandler(manager, termination_config=config):
            ...

    Attributes:
        termination_watcher_fn: called without arguments where a step ends, until it returns a
            true value: this machine will be taken away. It must return at once.
        exit_fn: called without arguments on every worker after the last save and after the
            handlers are closed, instead of raising ``SystemExit(42)``. If it returns, the program
            goes on, and no handler listens any more.
        grace_period: the seconds between the announcement and the end of the machine. If it is
            above 0, the handler saves at once, training continues, and the handler saves again
            and exits before the time is over. ``None`` and 0: it saves at once and exits.
        save_fn: called without arguments on every worker instead of ``manager.save(step)``. It
            may save with ``manager`` or with ``manager.checkpoint``; the handler waits for what
            goes on beside.

    Raises:
        TypeError: a function is not callable, or the grace period is not a number.
        ValueError: the grace period is negative or not finite.
    """

    termination_watcher_fn: Callable[[], object] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            fn = getattr(self, name)
            if fn is not None and not callable(fn):
                raise TypeError(
                    f"{name} must be a function without arguments, got {short_repr(fn)}; pass "
                    "the function itself, not what it returns"
                )
        seconds = self.grace_period
        if seconds is None:
            return
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(
                f"grace_period must be a number of seconds, got {short_repr(seconds)}; pass 30 or "
                "0.5, or 0 to exit after the first save"
            )
        if not 0 <= seconds < math.inf:
            raise ValueError(
                f"grace_period must be finite and >= 0 seconds, got {seconds}; pass 0 to exit "
                "after the first save"
            )
