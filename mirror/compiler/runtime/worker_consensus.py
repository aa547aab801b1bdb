"""Agreement: all workers make a call of a step compiled, or none does.

[Note: Compiled steps of workers]
Whether a call is compiled is found by each worker: sizes, state and assumptions are its own. But a
compiled step meets the others elsewhere than an uncompiled one. So ahead of each call the workers
say, in one exchange of a few bytes, what they have, and what their examples count for:

    all have programs            these run; gradients count ``w_r / W``, W of all workers
    some have none               the call is uncompiled on all
    some will never have any     so are all calls from now on
    programs that meet unlike    a DivergenceError
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.execution.replicas import shares_of

_CALL = "a compiled step"
_SAID = struct.Struct("<??qd8s")


@dataclass(frozen=True, slots=True)
class HasShares:
    """What the replicas of a call count for.

    Attributes:
        count: how many take part, of all workers'.
        total: what these count for, together.
        local: the same of this worker's.
    """

    count: int
    total: float
    local: float

    def shares(
        self, active: Sequence[int], weights: Sequence[float] | None, *, weighted: bool
    ) -> dict[int, float]:
        """Returns what the gradient of each of these replicas counts for. See [Note: Shares]."""
        counting = {r: 1.0 if weights is None else float(weights[r]) for r in active}
        return shares_of(counting, weighted=weighted, count=self.count, total=self.total)


class HasCollectives:
    """What the replicas of a program meet for: alike on all workers.

    Attributes:
        digest: of all of it, 8 bytes.
        words: what it is, in short.
    """

    def __init__(self, meetings: Sequence[tuple[str | None, Sequence[str], object]]) -> None:
        """Takes of each meeting its reduction, or the parameters of gradients, and their lie."""
        self.digest = hashlib.blake2b(repr(meetings).encode(), digest_size=8).digest()
        self.words = ", ".join(
            op or f"gradients of {len(parameters)} parameters" for op, parameters, _ in meetings
        )


class WorkerConsensus:
    """What the workers of a strategy say ahead of a call.

    Attributes:
        is_final: whether no call is compiled from now on.
    """

    def __init__(self, workers: LocalWorkerGroup) -> None:
        self._workers = workers
        self.is_final = False

    def meet(
        self, meets: HasCollectives | None, active: Sequence[int], weights: Sequence[float] | None
    ) -> HasShares | None:
        """Returns what the replicas count for; ``None`` if the call is to be uncompiled.

        Args:
            meets: what this worker's programs meet for; ``None``: it has none.

        Raises:
            DivergenceError: the workers are at different operations, or their programs meet for
                different things.
        """
        count = len(active)
        local = float(count) if weights is None else float(sum(weights[r] for r in active))
        if not self._workers.is_multi_process:
            return None if meets is None else HasShares(count, local, local)
        digest = b"" if meets is None else meets.digest
        mine = _SAID.pack(meets is not None, self.is_final, count, local, digest)
        said = [_SAID.unpack(one) for one in self._workers.exchange(_CALL, None, lambda: mine)]
        have, final, counts, weighed, digests = zip(*said, strict=True)
        self.is_final = any(final)
        if not all(have):
            return None
        assert meets is not None
        if len(set(digests)) > 1:
            # Raises: not all say the same.
            self._workers.exchange(f"{_CALL} that meets for {meets.words} ({meets.digest.hex()})")
        return HasShares(sum(counts), sum(weighed), local)
