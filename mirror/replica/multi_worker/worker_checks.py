"""WorkerChecks: whether all workers hold the same bits; of each value a hash travels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mirror.errors import ReplicaMismatchError
from mirror.replica.params.bitwise import bytes_of
from mirror.replica.replica_checks import ReplicaChecks
from mirror.values import leaves_of

_HASH_BYTES = 8


class WorkerChecks(ReplicaChecks):
    """Whether parameters and optimizer state are equal on all replicas of all workers.

    All workers raise if any finds a difference: else those that do not would wait for it.
    """

    def check(self) -> None:
        """Compares this worker's replicas, and then the workers, bit for bit."""
        self._over_workers(super().check)

    def check_sums(self) -> None:
        """Compares this worker's replicas by sums, and then the workers by hashes."""
        self._over_workers(super().check_sums)

    def _over_workers(self, check_here: Callable[[], None]) -> None:
        own: ReplicaMismatchError | None = None
        try:
            check_here()
        except ReplicaMismatchError as error:
            own = error
        names: list[Callable[[], str]] = []
        hashes: list[bytes] = []

        def see(value: Any, what: Callable[[], str]) -> None:
            names.append(what)
            hashes.append(_hash(value))

        with torch.inference_mode(False), torch.no_grad():
            self.show_first(see)
        said = str(own or "").encode()
        size = _HASH_BYTES * len(hashes)
        every = self._replicas.workers.exchange(
            "check_replicas", len(hashes), lambda: b"".join(hashes) + said
        )
        if own is not None:
            raise own
        for rank, theirs in enumerate(every):
            if theirs[size:]:
                raise ReplicaMismatchError(f"on worker {rank}: {theirs[size:].decode()}")
        for rank, theirs in enumerate(every):
            for i, what in enumerate(names):
                at = slice(_HASH_BYTES * i, _HASH_BYTES * (i + 1))
                if theirs[at] != every[0][at]:
                    raise ReplicaMismatchError(
                        f"{what()} differs on worker {rank} from worker 0; workers must hold the "
                        "same bits: look for a write that is not the same on all workers"
                    )


def _hash(value: Any) -> bytes:
    found = hashlib.blake2b(digest_size=_HASH_BYTES)
    for leaf in leaves_of(value):
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            for raw in bytes_of(leaf):
                found.update(raw)
        elif isinstance(leaf, (int, float, complex, str, bool)):
            found.update(repr(leaf).encode())
    return found.digest()
