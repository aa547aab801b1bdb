"""FirstValues: all workers begin to train with worker 0's values of variables and buffers.

[Note: First values]
Only rank 0 may load weights, and modules may be called before that: a layer in a constructor, a
lazy model, an evaluation. So a call distributes values, but does not make them final. Until an
optimizer steps, every call, run and reduction of gradients is a *round*: each worker sends its
stage, and flags for the values that may have changed on it since the last round. A value that has
changed on any worker is replaced by worker 0's on all workers.

    CALL      without gradients            continues after one round
    FORWARD   with gradients               continues once all workers are at FORWARD or REDUCE
    REDUCE    gradients are reduced        continues once all workers are at REDUCE

So a worker may make calls that other workers do not make. If values change after the first forward
pass of another worker, DivergenceError is raised, since that worker's gradients belong to other
values. After ``_MAX_ROUNDS`` calls of one stage without a change, only a change starts a round: a
program that never trains may have a different number of batches on each worker.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import struct
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from mirror.base.bitwise import bytes_of
from mirror.errors import DivergenceError
from mirror.execution.lifecycle import LifecycleHooks
from mirror.execution.replicas import Replicas
from mirror.replica.params.mirrored_buffer import ReplicatedBuffer
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_buffers import Buffers
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.replicated_params import MirroredTensors, ReplicatedParams
from mirror.threads.user_frames import user_line

_logger = logging.getLogger("mirror")

CALL, FORWARD, REDUCE = range(3)
_MAX_ROUNDS = 16
_STATUS = struct.Struct("<BI?I")  # the fields of _Status

_Record: TypeAlias = ReplicatedParam | ReplicatedBuffer


class _Status(NamedTuple):
    """A worker's status in a round; one flag per value follows it.

    Attributes:
        stage: CALL, FORWARD or REDUCE.
        num_skipped: the number of calls without a round since the last one.
        has_changed: whether any flag is set.
        line: a hash of the user's line of code.
    """

    stage: int
    num_skipped: int
    has_changed: bool
    line: int


class FirstValues:
    """Copies worker 0's values to all workers until training begins. See [Note: First values].

    So seeds may differ between workers, and a single worker may load pretrained weights. Later
    changes, such as load_state_dict, must be made by every worker; ``check_replicas`` checks that.

    Args:
        modules: returns the mirrored modules and their paths, in the order of registration.
    """

    def __init__(
        self,
        replicas: Replicas,
        registry: MirroredTensors,
        variables: ReplicatedParams,
        buffers: Buffers,
        modules: Callable[[], Iterable[tuple[nn.Module, str]]],
    ) -> None:
        self._replicas, self._workers, self._registry = replicas, replicas.workers, registry
        self._variables, self._buffers, self._modules = variables, buffers, modules
        self._num_owned = self._num_steps = 0
        self._is_open = False  # whether any value is not final
        self._final: weakref.WeakSet[_Record] = weakref.WeakSet()
        # The distributed values that are not final: version, and bits while storage is exposed.
        self._shared: weakref.WeakKeyDictionary[_Record, tuple[int, bytes | None]] = (
            weakref.WeakKeyDictionary()
        )
        self._num_calls = [0, 0]  # rounds of CALL and FORWARD since the last change
        self._num_skipped = 0  # calls without a round since the last one
        self._calls_differ = False  # whether worker 0 was at another line in a round of CALL
        self._has_reduced = False

    def part(self) -> LifecycleHooks:
        """Returns the hooks that distribute values before runs. See [Note: Parts]."""
        return LifecycleHooks(name="first values", prepare=self._prepare)

    def wait_for_reduce(self) -> None:
        """Waits until all workers reduce gradients, if training has not begun."""
        if not self._is_open:
            return
        self._finalize_after_step()
        if self._is_open:
            self._synchronize(
                REDUCE, [one for one in self._collect_records() if one[0] in self._shared]
            )
            self._has_reduced = True

    def _prepare(self) -> None:
        has_new = self._registry.num_owned != self._num_owned
        if self._is_open:
            self._finalize_after_step()
        if not has_new and not self._is_open:
            return
        self._num_owned = self._registry.num_owned
        stage = FORWARD if torch.is_grad_enabled() else CALL
        if has_new:
            self._num_calls = [0, 0]
        elif self._num_calls[stage] >= _MAX_ROUNDS and not any(map(_may_write, self._shared)):
            if all(_version_of(one) == known for one, (known, _) in self._shared.items()):
                self._num_skipped += 1
                return
        self._num_calls[stage] += 1
        named = [one for one in self._collect_records() if one[0] not in self._final]
        if named:
            self._num_steps, self._is_open = self._workers.num_steps, True
            self._synchronize(stage, named)

    def _finalize_after_step(self) -> None:
        """Makes the distributed values final if an optimizer has stepped since."""
        if self._workers.num_steps != self._num_steps:
            self._finalize()

    def _finalize(self) -> None:
        self._final.update(self._shared)
        self._shared.clear()
        self._is_open = False
        self._num_skipped, self._has_reduced, self._calls_differ = 0, False, False

    def _synchronize(self, stage: int, named: Sequence[tuple[_Record, str]]) -> None:
        """Exchanges rounds until every worker has reached this stage."""
        records = [record for record, _ in named]
        what = f"the first values of {len(named)} variables and buffers"
        signature = [_describe(record, name) for record, name in named]
        line = zlib.crc32(user_line(sys._getframe()).encode())
        while True:
            flags = bytes(map(self._has_changed, records))
            mine = _STATUS.pack(stage, self._num_skipped, any(flags), line) + flags
            every = self._workers.exchange(what, signature, lambda mine=mine: mine)  # type: ignore[misc]
            statuses = [_Status(*_STATUS.unpack_from(one)) for one in every]
            stages = [one.stage for one in statuses]
            columns = zip(*(one[_STATUS.size :] for one in every), strict=True)
            changed = list(map(any, columns))
            given = [record for record, flag in zip(records, changed, strict=True) if flag]
            if given:
                for record, name in named:  # the same names and order on all workers
                    record.name = name
                keys = [id(record.owner()) for record in records]
                for known in (self._registry, self._variables, self._buffers):
                    known.put_in_order(keys)
                if REDUCE in stages and min(stages) < REDUCE:
                    raise _late_change_error(stages, named[changed.index(True)][1])
                self._warn_if_stale(statuses)
                # Written in place: the new version is detected, and the value is then broadcast
                # to the other replicas of this worker.
                with torch.inference_mode(False), torch.no_grad():
                    self._workers.broadcast(what, list(map(_value, given)))
                self._num_calls = [0, 0]
            self._num_skipped = 0
            self._calls_differ |= stage == CALL and statuses[0].line != line
            for record in given:
                self._shared[record] = _version_of(record), _bits(record)
            if given and self._has_reduced and all(one.has_changed for one in statuses):
                self._finalize()  # the program updates values without an optimizer
                return
            if min(stages) >= stage:
                return

    def _has_changed(self, record: _Record) -> bool:
        """Whether a value may have changed on this worker since it was distributed."""
        if record not in self._shared:
            return True
        version, bits = self._shared[record]
        if _version_of(record) != version:
            return not (isinstance(record, ReplicatedBuffer) and not record.is_written_outside())
        return _may_write(record) and bits != _bits(record)

    def _warn_if_stale(self, statuses: Sequence[_Status]) -> None:
        """Warns of results that this worker may have computed from old values."""
        first, differ = statuses[0], self._calls_differ
        if first.has_changed and (differ or self._num_skipped > first.num_skipped):
            how = "at other lines of the program" if differ else "more often"
            _logger.warning(
                "worker 0 has changed values before training, and this worker has called modules "
                "%s than worker 0 had by then: the results of these calls may be computed from "
                "the old values; load weights on all workers, or before the first call",
                how,
            )
        self._calls_differ = self._calls_differ and not first.has_changed

    def _collect_records(self) -> list[tuple[_Record, str]]:
        """Returns the mirrored variables and buffers with their names.

        They are in the order of the modules, which is the same on all workers: a parameter that
        one worker has replaced is in the old one's place.
        """
        found: dict[_Record, str] = {}
        for module, path in self._modules():
            for entries in (module._parameters, module._buffers, vars(module)):
                for name, value in dict.items(entries):
                    if isinstance(value, MirroredTensor):
                        record: _Record = value._mirrored  # type: ignore[attr-defined]
                        if record.replicas is self._replicas:
                            found.setdefault(record, f"{path}.{name}".lstrip("."))
        if any(one not in found for one in self._all_records()):
            gc.collect()  # frees on all workers what some have freed
            for one in self._all_records():
                found.setdefault(one, one.name)
        return list(found.items())

    def _all_records(self) -> Iterable[_Record]:
        return (*self._variables, *self._buffers)


def _describe(record: _Record, name: str) -> tuple[str, str, tuple[int, ...], bool]:
    value = _value(record)
    is_trained = isinstance(record, ReplicatedParam) and record.targets[0].requires_grad
    return name, str(value.dtype), tuple(value.shape), is_trained


def _value(record: _Record) -> Tensor:
    value = record.targets[0] if isinstance(record, ReplicatedParam) else record.truth
    return value.detach()


def _version_of(record: _Record) -> int:
    return record.shown._version if isinstance(record, ReplicatedParam) else record.truth._version


def _may_write(record: _Record) -> bool:
    """Whether raw storage of a value is or was exposed."""
    return bool(record.handles)


def _bits(record: _Record) -> bytes | None:
    """Returns a hash of a value that may be written without a new version; ``None`` of others."""
    if not _may_write(record):
        return None
    found = hashlib.blake2b(digest_size=16)
    for raw in bytes_of(_value(record)):
        found.update(raw)
    return found.digest()


def _late_change_error(stages: Sequence[int], name: str) -> DivergenceError:
    """Returns the error for values that change between a worker's forward and its gradients."""
    behind = ", ".join(str(rank) for rank, stage in enumerate(stages) if stage < REDUCE)
    return DivergenceError(
        f"the values of {name!r} have changed after the first forward pass of some workers, so "
        f"their gradients belong to other values (workers that have not come as far: {behind}); "
        "load weights, or change values, before the first training step of any worker: on all "
        "workers at the same place of the program, or on worker 0 before any worker's first "
        "forward"
    )
