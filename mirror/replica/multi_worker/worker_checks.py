"""WorkerChecks: whether all workers hold the same bits; workers exchange a hash per value."""

from __future__ import annotations

import gc
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

    If one worker finds a difference, all workers raise: otherwise they would wait for it.
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
        if not self._are_equal(own):
            # An unreachable reference cycle with a model or optimizer lives until a collection,
            # which runs at different times on the workers. All workers see the difference, so all
            # collect, and compare again.
            gc.collect()
            self._are_equal(own, is_last=True)

    def _are_equal(self, own: ReplicaMismatchError | None, *, is_last: bool = False) -> bool:
        """Whether all workers hold equal values.

        Args:
            own: the difference that this worker has found between its replicas.
            is_last: whether to raise if workers differ.

        Raises:
            ReplicaMismatchError: replicas of a worker differ; or workers differ, and it is last.
            DivergenceError: it is last, and workers hold different numbers of values.
        """
        names: list[Callable[[], str]] = []
        hashes: list[bytes] = []

        def see(value: Any, what: Callable[[], str]) -> None:
            names.append(what)
            hashes.append(_hash(value))

        with torch.inference_mode(False), torch.no_grad():
            self.show_first(see)
        error = str(own or "").encode()
        every = self._replicas.workers.exchange(
            "check_replicas",
            len(hashes) if is_last else None,
            lambda: b"".join([len(hashes).to_bytes(_HASH_BYTES, "big"), *hashes, error]),
        )
        if own is not None:
            raise own
        bodies = []
        for rank, theirs in enumerate(every):
            size = _HASH_BYTES * (1 + int.from_bytes(theirs[:_HASH_BYTES], "big"))
            if theirs[size:]:
                raise ReplicaMismatchError(f"on worker {rank}: {theirs[size:].decode()}")
            bodies.append(theirs[_HASH_BYTES:size])
        if all(body == bodies[0] for body in bodies):
            return True
        if not is_last:
            return False
        for rank, body in enumerate(bodies):
            for i, what in enumerate(names):
                span = slice(_HASH_BYTES * i, _HASH_BYTES * (i + 1))
                if body[span] != bodies[0][span]:
                    raise ReplicaMismatchError(
                        f"{what()} differs on worker {rank} from worker 0; workers must hold the "
                        "same bits: look for a write that is not the same on all workers"
                    )
        return True


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
