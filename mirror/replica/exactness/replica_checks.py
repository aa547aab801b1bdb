"""Checks that replicas, and workers, hold the same bits.

``ReplicaChecks`` compares replicas, exactly or by checksums. ``WorkerChecks`` compares workers,
which exchange a hash per value.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mirror.base.bitwise import bytes_of, same_bits, same_values, sum_of_bits
from mirror.errors import ReplicaMismatchError
from mirror.execution.runner import Runner
from mirror.replica.params.mirrored_tensor import path_of
from mirror.values import leaves_of


class ComparePair(Protocol):
    """Compares two nested values, of the first replica and of another one."""

    def __call__(self, first: Any, other: Any, what: Callable[[], str]) -> None:
        """Raises ReplicaMismatchError, at once or after all pairs, if the values differ.

        Args:
            what: returns the description of the difference: which value, on which replica.
        """


class VisitValue(Protocol):
    """Gets every value of the first replica, for example to hash it."""

    def __call__(self, value: Any, what: Callable[[], str]) -> None:
        """Gets one value, and a function that returns its description."""


class ComparableParam(Protocol):
    """A parameter with copies to compare."""

    name: str

    @property
    def home(self) -> Tensor: ...

    @property
    def targets(self) -> Sequence[Tensor]: ...

    def owner(self) -> Tensor | None: ...

    def explain_apart(self) -> str | None: ...


class ComparableOptimizers(Protocol):
    """The optimizers of a strategy, with state to compare."""

    def check(self, compare: ComparePair) -> None:
        """Calls ``compare`` with the first replica's state and that of every other replica."""

    def visit_first(self, visit: VisitValue) -> None:
        """Calls ``visit`` with the first replica's state, always in the same order."""


class ReplicaChecks:
    """Checks whether parameters and optimizer state are equal on all replicas of a strategy.

    And whether all tensors of a parameter on one replica are one memory: what forward reads must
    be what optimizers step. See [Note: Three tensors, one storage].

    First, changes that were made in the cross-replica context are broadcast.
    """

    def __init__(
        self,
        runner: Runner,
        variables: Iterable[ComparableParam],
        optimizers: ComparableOptimizers,
    ) -> None:
        self._runner, self._replicas = runner, runner.replicas
        self._variables, self._optimizers = variables, optimizers

    def check(self) -> None:
        """Compares all values bit for bit.

        Raises:
            ReplicaMismatchError: naming the first variable and replica that differ.
        """
        self._runner.prepare("a comparison of the replicas")
        with torch.inference_mode(False), torch.no_grad():
            self._compare_all(_compare_exactly)
            self._check_places()

    def check_sums(self) -> None:
        """Compares checksums, which every device computes from its own values.

        See ``sum_of_bits``: only values in another order have the same checksum. On simulated
        devices nothing travels, so all values are compared bit for bit.

        Raises:
            ReplicaMismatchError: naming the first variable and replica that differ.
        """
        if self._replicas.are_simulated:
            self.check()
            return
        self._runner.prepare("a comparison of the replicas")
        with torch.inference_mode(False), torch.no_grad():
            sums = _Checksums()
            self._compare_all(sums)
            sums.compare()
            self._check_places()

    def visit_first(self, visit: VisitValue) -> None:
        """Calls ``visit`` with every value of the first replica."""
        for variable in self._variables:

            def describe(variable: ComparableParam = variable) -> str:
                return f"parameter {path_of(variable.owner(), variable.name)!r}"

            visit(variable.home, describe)
        self._optimizers.visit_first(visit)

    def _compare_all(self, compare: ComparePair) -> None:
        names = self._replicas.names
        first = names[0]
        if self._replicas.has_parameter_device:
            first = f"the parameter device ({self._replicas.parameter_device})"
        for variable in self._variables:
            for r, other in enumerate(variable.targets):
                if other is variable.home:
                    continue

                def describe(variable: ComparableParam = variable, r: int = r) -> str:
                    path = path_of(variable.owner(), variable.name)
                    return f"parameter {path!r} differs on {names[r]} from {first}"

                compare(variable.home, other, describe)
        self._optimizers.check(compare)

    def _check_places(self) -> None:
        for variable in self._variables:
            apart = variable.explain_apart()
            if apart is not None:
                raise ReplicaMismatchError(
                    f"parameter {path_of(variable.owner(), variable.name)!r} lies in two places: "
                    f"{apart} must be one memory, or forward computes with values that optimizers "
                    "do not update; look for code below Python that gives a tensor other memory, "
                    "and assign p.data instead"
                )


def _compare_exactly(first: Any, other: Any, what: Callable[[], str]) -> None:
    if not same_values(first, other):
        raise _mismatch(what())


class _Checksums:
    """Collects checksums on their devices, and compares all of them at once."""

    def __init__(self) -> None:
        self._firsts: dict[int, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor, Callable[[], str]]] = []

    def __call__(self, first: Any, other: Any, what: Callable[[], str]) -> None:
        pairs = [list(leaves_of(value)) for value in (first, other)]
        tensors = [[leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves in pairs]
        plain = [[None if isinstance(leaf, Tensor) else leaf for leaf in p] for p in pairs]
        kinds = [[(t.shape, t.dtype, t.layout) for t in found] for found in tensors]
        if kinds[0] != kinds[1] or not same_values(*plain):
            raise _mismatch(what())
        for a, b in zip(*tensors, strict=True):
            if a.layout is torch.strided:
                known = self._firsts.get(id(a))
                if known is None:
                    known = self._firsts[id(a)] = sum_of_bits(a)
                self._pairs.append((known, sum_of_bits(b), what))
            elif not same_bits(a, b):
                raise _mismatch(what())

    def compare(self) -> None:
        """Raises ReplicaMismatchError for the first checksums that differ."""
        sums = {id(s): s for one, other, _ in self._pairs for s in (one, other)}
        by_device: dict[torch.device, list[int]] = {}
        for key, tensor in sums.items():
            by_device.setdefault(tensor.device, []).append(key)
        values: dict[int, int] = {}
        for keys in by_device.values():
            values.update(zip(keys, torch.stack([sums[k] for k in keys]).tolist(), strict=True))
        for one, other, what in self._pairs:
            if values[id(one)] != values[id(other)]:
                raise _mismatch(what())


def _mismatch(what: str) -> ReplicaMismatchError:
    return ReplicaMismatchError(
        f"{what}; replicas must hold the same bits: look for a write inside run that is not the "
        "same on all replicas"
    )


_HASH_BYTES = 8


class WorkerChecks(ReplicaChecks):
    """Whether parameters and optimizer state are equal on all replicas of all workers.

    If one worker finds a difference, all workers raise: otherwise they would wait for it.
    """

    def check(self) -> None:
        """Compares this worker's replicas, and then the workers, bit for bit."""
        self._check_over_workers(super().check)

    def check_sums(self) -> None:
        """Compares this worker's replicas by sums, and then the workers by hashes."""
        self._check_over_workers(super().check_sums)

    def _check_over_workers(self, check_here: Callable[[], None]) -> None:
        own: ReplicaMismatchError | None = None
        try:
            check_here()
        except ReplicaMismatchError as error:
            own = error
        if not self._are_equal(own):
            # An unreachable reference cycle with a model or optimizer lives until a collection,
            # which runs at different times on the workers. A compiled step keeps the optimizers
            # of its traces, and only some workers may have one. All workers see the difference,
            # so all drop both, and compare again.
            for cache in self._replicas.caches:
                cache.clear()
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

        def visit(value: Any, what: Callable[[], str]) -> None:
            names.append(what)
            hashes.append(_hash(value))

        with torch.inference_mode(False), torch.no_grad():
            self.visit_first(visit)
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
