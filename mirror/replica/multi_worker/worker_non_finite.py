"""NonFinite: if one worker finds a gradient that is not finite, all workers raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.errors import GradientError
from mirror.replica.gradients.non_finite import NonFiniteCheck
from mirror.replica.gradients.ready_grads import ReplicaGrads
from mirror.replica.params.replicated_param import ReplicatedParam


class NonFinite:
    """The gradients that are not finite on this worker, since the last exchange.

    Args:
        finite: checks gradients; ``None`` for no check.

    Attributes:
        is_looked_for: whether gradients are checked.
        found: the error that ``exchange`` will raise.
    """

    def __init__(self, workers: LocalWorkerGroup, finite: NonFiniteCheck | None) -> None:
        self._workers, self._finite = workers, finite
        self.is_looked_for = finite is not None
        self.found: GradientError | None = None

    def are_non_finite(self, columns: Sequence[ReplicaGrads]) -> bool:
        """Whether some gradients are not finite; records nothing."""
        return self._finite is not None and not self._finite.all_finite(columns)

    def scan(
        self,
        variables: Sequence[ReplicatedParam | None],
        columns: Sequence[ReplicaGrads],
        shares: Mapping[int, float],
    ) -> None:
        """Records the first gradient that is not finite, of replicas with a share."""
        if self._finite is None or self.found is not None:
            return
        grads = [mine if shares.get(r) else [] for r, mine in enumerate(columns)]
        if self.are_non_finite(grads):
            try:
                self._finite.raise_error(grads, variables)
            except GradientError as error:
                self.found = error

    def exchange(self) -> None:
        """Raises GradientError on all workers if one of them has recorded an error."""
        mine, self.found = self.found, None
        messages = self._workers.exchange(
            "a look for gradients that are not finite", None, lambda: str(mine or "").encode()
        )
        if mine is not None:
            raise mine
        for message in messages:
            if message:
                raise GradientError(message.decode())
