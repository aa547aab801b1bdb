"""Checks that replicas, and workers, hold the same bits.

``same_bits`` compares tensors of any layout, and nested values that hold tensors.
``ReplicaChecks`` compares replicas, exactly or by checksums. ``WorkerChecks`` compares workers,
which exchange a hash per value. ``EveryNSteps`` repeats a check during training.

Buffers may differ between replicas. Then the logger "mirror" warns, once for each buffer.
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mirror.errors import ReplicaMismatchError
from mirror.execution.runner import Runner
from mirror.replica.params.mirrored_tensor import path_of
from mirror.threads.user_frames import add_note
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


class ComparableOptimizers(Protocol):
    """The optimizers of a strategy, with state to compare."""

    def check(self, compare: ComparePair) -> None:
        """Calls ``compare`` with the first replica's state and that of every other replica."""

    def visit_first(self, visit: VisitValue) -> None:
        """Calls ``visit`` with the first replica's state, always in the same order."""


class ReplicaChecks:
    """Checks whether parameters and optimizer state are equal on all replicas of a strategy.

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


_PLAIN = (int, float, complex, str, bool)
_SUMMED_AT_ONCE = 2**24  # elements, of 8 temporary bytes each


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal bits; NaN equals NaN, 0.0 differs from -0.0.

    Sparse tensors are equal if they have the same entries with equal bits, in any order.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        return all(map(same_bits, _parts(a), _parts(b)))
    a, b = (t.detach().cpu().resolve_conj().resolve_neg().contiguous() for t in (a, b))
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def bytes_of(tensor: Tensor) -> list[Any]:
    """Returns the bytes of a tensor of any layout: a uint8 array per strided part."""
    if tensor.layout is not torch.strided:
        return [raw for part in _parts(tensor) for raw in bytes_of(part)]
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return [host.reshape(-1).view(torch.uint8).numpy()]


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Returns a checksum of a dense tensor's bits: int64, 0-d, on its device.

    It is the sum over all elements of ``b + 2 * b ** 2`` modulo ``2 ** 64``, where ``b`` is the
    element's bits as an integer. This number is different for every ``b``, so a change of a single
    element changes the checksum. A sum of ``b`` itself would be weaker: rounding differences of +1
    and -1 in the last bit often cancel.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.view(kind[tensor.element_size()]).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(_SUMMED_AT_ONCE):
        wide = part.to(torch.int64)
        total += torch.addcmul(wide, wide, wide, value=2).sum()
    return total


def same_values(a: Any, b: Any) -> bool:
    """Whether two nested values hold tensors with equal bits and equal numbers and strings."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same_values(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_values, a, b))
    return not isinstance(a, _PLAIN) or a == b or a != a


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the strided tensors of which a sparse tensor consists."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach().coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.detach().to_dense(),)


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


class EveryNSteps:
    """Calls ``act`` after every ``num_steps`` steps of a strategy, between runs.

    A step ends with an optimizer step outside ``run``, or with the ``run`` in which an optimizer
    stepped. See [Note: Ends of steps].

    Attributes:
        num_steps_done: the number of steps since this object was created.
    """

    def __init__(self, num_steps: int, runner: Runner, act: Callable[[], None]) -> None:
        self.num_steps_done = self._last = 0
        self._every, self._num_remaining = num_steps, num_steps
        self._runner, self._act = runner, act
        runner.replicas.timeline.at_step_ends.append(self._step_ends)

    def _step_ends(self) -> None:
        self.num_steps_done += 1
        self._num_remaining -= 1
        # In a merge, or in a parallel backward pass, the replicas are not done.
        is_due = self._num_remaining <= 0 and not self._runner.is_closed
        if is_due and self._runner.is_between_runs:
            before, self._last = self._last, self.num_steps_done
            self._num_remaining = self._every
            try:
                self._act()
            except Exception as error:
                then = f"after step {before}" if before else "never"
                add_note(error, f"found after step {self._last}; looked at before: {then}")
                raise


# The first runs that write a buffer are checked. Statistics of batch normalisations, which are
# averaged, get a message of their own, one for all layers. It is a warning under `mirror run`:
# its scripts do not expect replicas. A program that makes a strategy has the default of
# tf.distribute and DistributedDataParallel; there its level is INFO.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NUM_CHECKED_RUNS = 2
_logger = logging.getLogger("mirror")
_statistics_level = [logging.INFO]

# The words of the warning, and of `mirror check`.
STATISTICS_OF_PARTS = (
    "{} normalises with mean and variance of its replica's part of the batch, and one device with "
    "those of the whole batch"
)
USE_WHOLE_BATCH = (
    "mirror.nn.convert_sync_batchnorm(model), or mirror run --sync-batch-norm for the unchanged "
    "script"
)


def num_checked_runs(module: nn.Module, name: str) -> int:
    """Returns after how many runs that write a buffer it is checked no more.

    A batch normalisation writes its statistics without a new version. So its counter shows that
    it has run, and stands for them. An instance normalisation averages over examples.
    """
    if isinstance(module, BATCH_NORMS):
        return _NUM_CHECKED_RUNS if name.endswith("num_batches_tracked") else 0
    return 0 if isinstance(module, _INSTANCE_NORMS) else _NUM_CHECKED_RUNS


def are_different(copies: Sequence[Tensor]) -> bool:
    """Returns whether copies of one buffer differ."""
    return any(
        other.shape != copies[0].shape or not torch.equal(other.to(copies[0].device), copies[0])
        for other in copies[1:]
    )


def warn_of_buffer(name: str, is_mean: bool) -> None:
    """Logs that the replicas have left a buffer different, and what is kept."""
    _logger.warning(
        "the replicas have left buffer %r different, for each has its part of the batch: what is "
        "kept is %s, which is not what one device has unless it is a mean over examples. Write it "
        "with what all replicas give (all_reduce or all_gather of mirror.get_replica_context()), "
        "or say how to combine it: mirror.set_aggregation(module, name, 'mean'), or 'sum', "
        "'first', 'none'",
        name,
        "the mean of theirs" if is_mean else "the first replica's value",
    )


@contextmanager
def statistics_are_warnings() -> Iterator[None]:
    """Has the message on statistics of parts be a warning inside."""
    _statistics_level.append(logging.WARNING)
    try:
        yield
    finally:
        _statistics_level.pop()


def log_statistics(norm: nn.Module, name: str, num_more: int) -> None:
    """Logs that layers normalise each part of the batch by itself.

    Args:
        norm, name: one of them; of a layer that was mirrored by itself the path is not known.
        num_more: how many others there are.
    """
    layer = f"{type(norm).__name__}({getattr(norm, 'num_features', '')})"
    _logger.log(
        _statistics_level[-1],
        "%s, so training differs from one device's%s; to use the whole batch: %s",
        STATISTICS_OF_PARTS.format(f"{layer} {name!r}" if name else layer),
        f" ({num_more} more such layer{'s' * (num_more > 1)})" if num_more else "",
        USE_WHOLE_BATCH,
    )
