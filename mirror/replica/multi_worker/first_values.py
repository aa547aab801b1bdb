"""FirstValues: all workers begin to train with worker 0's values of variables and buffers.

[Note: First values]
Rank 0 alone may load weights, and any call of a module may come before that: of a layer in a
constructor, of a lazy model, of an evaluation. So a call shares values, and does not settle them.
Until an optimizer steps, a call, a run and a reduction of gradients is a *round*: every worker
tells how far it is, and what may have changed there since the last round; what has changed on any
worker is given worker 0's value on all.

    CALL      without gradients            goes on after one round
    FORWARD   with gradients               goes on once all workers are there, or further
    REDUCE    gradients are reduced        goes on once all workers are there

So one worker may make calls that the others do not make. Values that change while another worker
has made the forward of its first pass are an error: its gradients are of other values. After
``_MOST_ROUNDS`` calls of one kind without a change only a change begins a round, as a program that
never trains may have other numbers of batches on each worker.
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

from mirror.errors import DivergenceError
from mirror.execution.lifecycle import LifecycleHooks
from mirror.execution.replicas import Replicas
from mirror.replica.params.bitwise import bytes_of
from mirror.replica.params.buffers import Buffers
from mirror.replica.params.mirrored_buffer import ReplicatedBuffer
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.replicated_params import MirroredTensors, ReplicatedParams
from mirror.threads.user_frames import user_line

_logger = logging.getLogger("mirror")

CALL, FORWARD, REDUCE = range(3)
_MOST_ROUNDS = 16
_SAID = struct.Struct("<BI?I")  # see _Said

_Record: TypeAlias = ReplicatedParam | ReplicatedBuffer


class _Said(NamedTuple):
    """What a worker says in a round, beside what has changed.

    Attributes:
        num_skipped: the calls that it has made without a round since the last one.
        line: a hash of the user's line.
    """

    stage: int
    num_skipped: int
    has_changed: bool
    line: int


class FirstValues:
    """Gives all workers worker 0's values until training begins. See [Note: First values].

    So seeds may differ between workers, and one may have read pretrained weights. What comes later
    (a load_state_dict, say) every worker does alike; ``check_replicas`` looks whether it did.

    Args:
        modules: returns the mirrored modules and their paths, in the order in which they came.
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
        self._is_open = False  # whether there are any that are not settled
        self._settled: weakref.WeakSet[_Record] = weakref.WeakSet()
        # Of those that are shared and not settled: version, and the bits while others may write.
        self._shared: weakref.WeakKeyDictionary[_Record, tuple[int, bytes | None]] = (
            weakref.WeakKeyDictionary()
        )
        self._num_calls = [0, 0]  # CALLs and FORWARDs since something has changed
        self._num_skipped = 0  # calls without a round since the last one
        self._calls_differ = False  # whether a round was of a call where worker 0 made another
        self._has_reduced = False

    def part(self) -> LifecycleHooks:
        """Returns what gives the values before runs. See [Note: Parts]."""
        return LifecycleHooks(name="first values", prepare=self._prepare)

    def before_reducing(self) -> None:
        """Waits until all workers reduce gradients, if training has not begun."""
        if not self._is_open:
            return
        self._settle_stepped()
        if self._is_open:
            self._meet(REDUCE, [one for one in self._held() if one[0] in self._shared])
            self._has_reduced = True

    def _prepare(self) -> None:
        has_new = self._registry.num_owned != self._num_owned
        if self._is_open:
            self._settle_stepped()
        if not has_new and not self._is_open:
            return
        self._num_owned = self._registry.num_owned
        stage = FORWARD if torch.is_grad_enabled() else CALL
        if has_new:
            self._num_calls = [0, 0]
        elif self._num_calls[stage] >= _MOST_ROUNDS and not any(map(_may_write, self._shared)):
            if all(_version_of(one) == known for one, (known, _) in self._shared.items()):
                self._num_skipped += 1
                return
        self._num_calls[stage] += 1
        held = [one for one in self._held() if one[0] not in self._settled]
        if held:
            self._num_steps, self._is_open = self._workers.num_steps, True
            self._meet(stage, held)

    def _settle_stepped(self) -> None:
        """Takes as settled what was shared before an optimizer has stepped."""
        if self._workers.num_steps != self._num_steps:
            self._settle()

    def _settle(self) -> None:
        self._settled.update(self._shared)
        self._shared.clear()
        self._is_open = False
        self._num_skipped, self._has_reduced, self._calls_differ = 0, False, False

    def _meet(self, stage: int, held: Sequence[tuple[_Record, str]]) -> None:
        """Makes rounds until every worker has come as far as this one."""
        records = [record for record, _ in held]
        what = f"the first values of {len(held)} variables and buffers"
        signature = [_described(record, name) for record, name in held]
        line = zlib.crc32(user_line(sys._getframe()).encode())
        while True:
            flags = bytes(map(self._has_changed, records))
            mine = _SAID.pack(stage, self._num_skipped, any(flags), line) + flags
            every = self._workers.exchange(what, signature, lambda mine=mine: mine)  # type: ignore[misc]
            said = [_Said(*_SAID.unpack_from(one)) for one in every]
            stages = [one.stage for one in said]
            columns = zip(*(one[_SAID.size :] for one in every), strict=True)
            changed = list(map(any, columns))
            given = [record for record, flag in zip(records, changed, strict=True) if flag]
            if given:
                self._put_in_order(held)
                if REDUCE in stages and min(stages) < REDUCE:
                    raise _too_late(stages, held[changed.index(True)][1])
                self._tell_if_stale(said)
                # Written in place, which is seen, and carried to the other replicas of this one.
                with torch.inference_mode(False), torch.no_grad():
                    self._workers.broadcast(what, list(map(_value, given)))
                self._num_calls = [0, 0]
            self._num_skipped = 0
            self._calls_differ |= stage == CALL and said[0].line != line
            for record in given:
                self._shared[record] = _version_of(record), _bits(record)
            if given and self._has_reduced and all(one.has_changed for one in said):
                self._settle()  # they update without an optimizer
                return
            if min(stages) >= stage:
                return

    def _put_in_order(self, held: Sequence[tuple[_Record, str]]) -> None:
        """Gives all variables and buffers one order, and the same names, on all workers."""
        for record, name in held:
            record.name = name
        keys = [id(record.owner()) for record, _ in held]
        for known in (self._registry, self._variables, self._buffers):
            known.put_in_order(keys)

    def _has_changed(self, record: _Record) -> bool:
        """Whether a value may have changed here since it was shared."""
        if record not in self._shared:
            return True
        version, bits = self._shared[record]
        if _version_of(record) != version:
            return not (isinstance(record, ReplicatedBuffer) and not record.is_written_outside())
        return _may_write(record) and bits != _bits(record)

    def _tell_if_stale(self, said: Sequence[_Said]) -> None:
        """Warns of results that this worker may have computed with values from before."""
        first, differ = said[0], self._calls_differ
        if first.has_changed and (differ or self._num_skipped > first.num_skipped):
            how = "at other lines of the program" if differ else "more often"
            _logger.warning(
                "worker 0 has changed values before training, and this worker has called modules "
                "%s than worker 0 had by then: what these calls returned may be of the values "
                "from before; load weights on all workers, or before the first call",
                how,
            )
        self._calls_differ = self._calls_differ and not first.has_changed

    def _held(self) -> list[tuple[_Record, str]]:
        """Returns what is mirrored, and its name, in one order on all workers.

        That of the modules: a parameter that one worker has replaced is where the old one was.
        """
        found: dict[_Record, str] = {}
        for module, path in self._modules():
            for entries in (module._parameters, module._buffers, vars(module)):
                for name, value in dict.items(entries):
                    if isinstance(value, MirroredTensor):
                        record: _Record = value._mirrored  # type: ignore[attr-defined]
                        if record.replicas is self._replicas:
                            found.setdefault(record, f"{path}.{name}".lstrip("."))
        if any(one not in found for one in self._unheld()):
            gc.collect()  # what is gone on some workers only
            for one in self._unheld():
                found.setdefault(one, one.name)
        return list(found.items())

    def _unheld(self) -> Iterable[_Record]:
        return (*self._variables, *self._buffers)


def _described(record: _Record, name: str) -> tuple[str, str, tuple[int, ...], bool]:
    value = _value(record)
    is_trained = isinstance(record, ReplicatedParam) and record.targets[0].requires_grad
    return name, str(value.dtype), tuple(value.shape), is_trained


def _value(record: _Record) -> Tensor:
    value = record.targets[0] if isinstance(record, ReplicatedParam) else record.truth
    return value.detach()


def _version_of(record: _Record) -> int:
    return record.shown._version if isinstance(record, ReplicatedParam) else record.truth._version


def _may_write(record: _Record) -> bool:
    """Whether somebody has, or has had, raw storage."""
    return bool(record.handles)


def _bits(record: _Record) -> bytes | None:
    """Returns the bits of a value that may be written unseen; ``None`` of any other."""
    if not _may_write(record):
        return None
    found = hashlib.blake2b(digest_size=16)
    for raw in bytes_of(_value(record)):
        found.update(raw)
    return found.digest()


def _too_late(stages: Sequence[int], name: str) -> DivergenceError:
    """Returns the error for values that change between a worker's forward and its gradients."""
    behind = ", ".join(str(rank) for rank, stage in enumerate(stages) if stage < REDUCE)
    return DivergenceError(
        f"the values of {name!r} have changed after the first forward pass of some workers, "
        f"whose gradients are of other values (workers that have not come as far: {behind}); "
        "load weights, or change values, before the first training step of any worker: on all "
        "workers at the same place of the program, or on worker 0 before the others' first forward"
    )
