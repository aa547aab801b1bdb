"""Parts: all that a strategy keeps equal, told together what happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mirror.execution.part import LifecycleHooks, nothing
from mirror.execution.run import Run


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

        self._at_prepare, self.at_returned = of("prepare"), of("returned")
        self._at_finish, self._at_ran = of("finish"), of("ran")
        self._at_bring_along, self._at_settle = of("bring_along"), of("settle")
        self._at_recover, self.at_merging = of("recover"), of("merging")

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
