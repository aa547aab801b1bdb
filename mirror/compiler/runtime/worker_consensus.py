"""WorkerConsensus: all workers run a call of a step compiled, or none does.

Each worker decides whether it has a program for a call: sizes, state and guards are its own. But a
compiled step has other collectives than an uncompiled one. So before each call the workers
exchange a few bytes: whether they have a program, and the weights of their examples.

    all have programs               these run; a gradient's share is ``w_r / W``, W of all workers
    one has none                    the call is uncompiled on all workers
    one will never have any         all calls are uncompiled from now on
    programs differ in collectives  DivergenceError
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.execution.run import shares_of

_CALL = "a compiled step"
_MESSAGE = struct.Struct("<??qd8s")


@dataclass(frozen=True, slots=True)
class CallShares:
    """The weights of the replicas of a call.

    Attributes:
        count: the number of replicas that take part, on all workers.
        total: the sum of their weights.
        local: the sum of the weights on this worker.
    """

    count: int
    total: float
    local: float

    def shares(
        self, active: Sequence[int], weights: Sequence[float] | None, *, weighted: bool
    ) -> dict[int, float]:
        """Returns the share of the gradient of each replica. See [Note: Shares]."""
        counting = {r: 1.0 if weights is None else float(weights[r]) for r in active}
        return shares_of(counting, weighted=weighted, count=self.count, total=self.total)


class ProgramCollectives:
    """The collective points of a program, which must be the same on all workers.

    Attributes:
        digest: a digest of them, 8 bytes.
        words: a short description.
    """

    def __init__(self, collectives: Sequence[tuple[str | None, Sequence[str], object]]) -> None:
        """Takes of each point its reduction, or the parameters of gradients, and their packing."""
        self.digest = hashlib.blake2b(repr(collectives).encode(), digest_size=8).digest()
        self.words = ", ".join(
            op or f"gradients of {len(parameters)} parameters" for op, parameters, _ in collectives
        )


class WorkerConsensus:
    """The exchange of the workers before each call.

    Attributes:
        is_final: whether no call is compiled from now on.
    """

    def __init__(self, workers: LocalWorkerGroup) -> None:
        self._workers = workers
        self.is_final = False

    def agree(
        self,
        collectives: ProgramCollectives | None,
        active: Sequence[int],
        weights: Sequence[float] | None,
    ) -> CallShares | None:
        """Returns the weights of the replicas; ``None`` if the call is to run uncompiled.

        Args:
            collectives: the collective points of this worker's programs; ``None``: it has none.

        Raises:
            DivergenceError: the workers are at different operations, or their programs have
                different collectives.
        """
        count = len(active)
        local = float(count) if weights is None else float(sum(weights[r] for r in active))
        if not self._workers.is_multi_process:
            return None if collectives is None else CallShares(count, local, local)
        digest = b"" if collectives is None else collectives.digest
        message = _MESSAGE.pack(collectives is not None, self.is_final, count, local, digest)
        messages = [
            _MESSAGE.unpack(one) for one in self._workers.exchange(_CALL, None, lambda: message)
        ]
        have, final, counts, weighed, digests = zip(*messages, strict=True)
        self.is_final = any(final)
        if not all(have):
            return None
        assert collectives is not None
        if len(set(digests)) > 1:
            # Raises: not all say the same.
            self._workers.exchange(
                f"{_CALL} with the collectives {collectives.words} ({collectives.digest.hex()})"
            )
        return CallShares(sum(counts), sum(weighed), local)
