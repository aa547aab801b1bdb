"""DistributedGroup: the worker processes of one training, over torch.distributed.

Process groups and the store are torch.distributed's. A lost worker is detected, see
[Note: Monitored waits], and the launcher (torchrun) starts it again.

[Note: One size, one group]
Problem: gloo ends the process when buffers of two sizes meet, and buckets of gradients cannot
wait for an envelope.
Rule: each bucket size has its own process group, created when the size first occurs. If there are
too many sizes, further buckets are announced in an envelope.
Consequence: workers that diverge, for example by reducing gradients of different networks, wait
in two groups, where the wait is detected.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mirror.comm.packing import copy_back
from mirror.comm.workers.checked_gather import CheckedGather, deserialize, serialize
from mirror.comm.workers.groups import Groups, SequencedGroup
from mirror.comm.workers.heartbeat import LineOf, summarize
from mirror.comm.workers.monitored_wait import MonitoredWait, Waitable
from mirror.comm.workers.worker_group import LocalWorkerGroup, Message, move_to_host
from mirror.comm.workers.worker_rendezvous import join_rendezvous
from mirror.comm.workers.worker_status import Exit, PendingOp
from mirror.errors import StrategyError, WorkerLostError

DEFAULT_SECONDS = 600.0
_MAX_SIZES = 64
# A group of its own: on one worker, these sums may start before the numbers of the next batch.
_REPLICA_SUMS = "sums of replicas"

T = TypeVar("T")


class ReplicaSums(Protocol):
    """Sums and gathers over all replicas; see ``nccl_all_reduce.py``."""

    def start(self, what: str, buffers: Sequence[Tensor]) -> Waitable[None]:
        """Starts to sum flat buffers, one per local replica, in place."""

    def start_gather(
        self, what: str, buffers: Sequence[Tensor], first: int, num_replicas: int
    ) -> Waitable[None]:
        """Starts to copy every replica's section of flat buffers to all replicas, in place."""

    def close(self) -> None:
        """Aborts the sums in flight; idempotent."""


class DistributedWorkerGroup(LocalWorkerGroup):
    """Several workers, of which this process is one.

    Uses the default process group, which it creates if there is none, and its own process groups.

    Args:
        num_local: the number of this worker's replicas.
        where: returns the user's line, for messages.
        timeout_seconds: how long to wait for a silent worker; None means 600.
        line_of: see ``LineOf``.
    """

    def __init__(
        self,
        num_local: int,
        where: Callable[[], str],
        timeout_seconds: float | None,
        line_of: LineOf = lambda error: "",
    ) -> None:
        self._where = where
        seconds = DEFAULT_SECONDS if timeout_seconds is None else timeout_seconds
        self._heartbeats = join_rendezvous(seconds, line_of)
        self.rank, self.size = self._heartbeats.rank, self._heartbeats.size
        self._monitor = MonitoredWait(self._heartbeats, seconds)
        self._groups = Groups(self._heartbeats, self._monitor, seconds)
        self._failure: BaseException | None = None
        self._replica_sums: ReplicaSums | None = None
        self._sums: dict[tuple[torch.dtype, int], SequencedGroup] = {}
        freed = Exit(is_loss=False, words="has let go of its strategy")
        weakref.finalize(self, self._groups.drop, freed).atexit = False
        self._main = self._call_guarded(lambda: self._group("main", "the start of a strategy"))
        self._gather = CheckedGather(partial(self._run, self._main), where, self.size)
        counts = self.exchange("the start of a strategy", None, lambda: b"%d" % num_local)
        self._set_counts(self.rank, [int(count) for count in counts])

    def exchange(
        self, what: str, signature: object = None, payload: Callable[[], bytes] = bytes
    ) -> list[bytes]:
        """See ``LocalWorkerGroup``."""
        own = payload()  # outside _call_guarded: its error does not end the strategy
        return self._call_guarded(lambda: self._gather.exchange(what, signature, own))

    def exchange_tensors(
        self,
        what: str,
        signature: object,
        tensors: Sequence[Tensor],
        numbers: Sequence[float] = (),
    ) -> list[Message]:
        """See ``LocalWorkerGroup``."""
        payloads = self.exchange(what, signature, lambda: serialize(tensors, numbers))
        return list(map(deserialize, payloads))

    def all_gather_int(self, what: str, number: int) -> Callable[[], list[int]]:
        """See ``LocalWorkerGroup``."""
        return self._all_gather_int("numbers", what, number)

    def _all_gather_int(self, name: str, what: str, number: int) -> Callable[[], list[int]]:
        """Gathers the numbers over the group of this name, which has its own order."""
        own = torch.tensor([number], device="cpu")
        numbers = [torch.empty_like(own) for _ in range(self.size)]

        def start() -> tuple[SequencedGroup, dist.Work, PendingOp]:
            group = self._group(name, what)
            words = f"{what} at {self._where()}"
            return group, *group.start(words, lambda pg: pg.allgather([numbers], [own]))

        group, work, op = self._call_guarded(start)

        def finish() -> list[int]:
            self._call_guarded(lambda: self._finish(group, work, op))
            return [int(tensor) for tensor in numbers]

        return finish

    def broadcast(self, what: str, tensors: Sequence[Tensor]) -> None:
        """See ``LocalWorkerGroup``."""
        described = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
        self.exchange(what, described)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            own = [tensor for tensor in tensors if tensor.dtype == dtype and tensor.numel()]
            if not own:
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in move_to_host(own)])
            raw = flat.view(torch.uint8)
            self._call_guarded(partial(self._gather.broadcast, what, raw))
            with torch.no_grad():
                copy_back(flat, [tensor.detach() for tensor in own])

    def all_reduce(self, what: str, buffer: Tensor) -> Callable[[], None]:
        """See ``LocalWorkerGroup``."""
        host = buffer if buffer.is_cpu else buffer.cpu()
        self._check_usable()
        try:
            group = self._sums.get((host.dtype, host.numel())) or self._group_for_sums(what, host)
            number, work = group.start_sum(host)
        except BaseException as error:
            self._give_up(error)
            raise

        def finish() -> None:
            self._check_usable()
            try:
                self._monitor.wait(work, lambda: PendingOp(group.name, number, what))
            except BaseException as error:
                self._give_up(error)
                raise
            group.finish(number)
            if host is not buffer:
                buffer.copy_(host)

        return finish

    def sum_replicas_by(self, sums: ReplicaSums) -> None:
        """Makes ``all_reduce_replicas`` use ``sums``; all workers must call it."""
        self._replica_sums, self.sums_replicas = sums, True

    def all_reduce_replicas(self, what: str, buffers: Sequence[Tensor]) -> Callable[[], None]:
        """See ``LocalWorkerGroup``, and [Note: Sums on GPUs]."""
        sums, described = self._replica_sums, f"{buffers[0].dtype}[{buffers[0].numel()}]"
        assert sums is not None
        hashed, described = zlib.crc32(described.encode()), f"{what} of {described}"
        hashes = self._all_gather_int(_REPLICA_SUMS, described, hashed)
        work = self._call_guarded(lambda: sums.start(what, buffers))

        def finish() -> None:
            if len(set(hashes())) > 1:  # different buffers; the exchange raises DivergenceError
                self._call_guarded(lambda: self._gather.exchange(described, described, b""))
            name = self._group(_REPLICA_SUMS, what).name
            op = PendingOp(name, self._heartbeats.started[name], what)
            self._call_guarded(lambda: self._monitor.wait(work, lambda: op))

        return finish

    def all_gather(self, what: str, buffers: Sequence[Tensor]) -> None:
        """See ``LocalWorkerGroup``; without NCCL, gloo gathers in host memory."""
        words, sums = f"{what} at {self._where()}", self._replica_sums
        if sums is not None and len(set(self.counts)) == 1:  # ranks have equal sections
            op, place = self._main.count(words), (self.replica_offset, self.num_replicas)
            work = self._call_guarded(lambda: sums.start_gather(what, buffers, *place))
            self._call_guarded(lambda: self._monitor.wait(work, lambda: op))
            return
        flats = [buffer.view(torch.uint8) for buffer in buffers]
        begin, most = self.sections[self.replica_offset], max(self.counts)
        num_bytes = flats[0].numel() // (self.size * most)  # of a section
        own = torch.zeros(most * num_bytes, dtype=torch.uint8, device="cpu")
        for i, flat in enumerate(flats):
            section = flat.narrow(0, (begin + i) * num_bytes, num_bytes)
            own.narrow(0, i * num_bytes, num_bytes).copy_(section)
        whole = flats[0] if flats[0].is_cpu else torch.empty_like(flats[0], device="cpu")
        parts = [*whole.tensor_split(self.size)]
        self._call_guarded(
            lambda: self._run(self._main, words, lambda pg: pg.allgather([parts], [own]))
        )
        for flat in flats:
            if flat is not whole:
                flat.copy_(whole)

    def all_reduce_sum_(self, what: str, buffer: Tensor) -> None:
        """See ``LocalWorkerGroup``."""
        self._call_guarded(lambda: self._run(self._main, what, lambda pg: pg.allreduce([buffer])))

    def _group_for_sums(self, what: str, buffer: Tensor) -> SequencedGroup:
        """Returns the group for buffers of a new size; see [Note: One size, one group]."""
        size = f"{str(buffer.dtype).removeprefix('torch.')}[{buffer.numel()}]"
        if len(self._sums) < _MAX_SIZES:
            group = self._group(f"sums of {size}", f"{what} of {size}")
            self._sums[buffer.dtype, buffer.numel()] = group
            return group
        self._gather.exchange(what, size, b"")
        return self._group("other sums", what)

    def _group(self, name: str, what: str) -> SequencedGroup:
        return self._groups.get(name, lambda: f"{what} at {self._where()}")

    def _run(self, group: SequencedGroup, words: str, call: Callable[[Any], dist.Work]) -> None:
        self._finish(group, *group.start(words, call))

    def _finish(self, group: SequencedGroup, work: dist.Work, op: PendingOp) -> None:
        self._monitor.wait(work, lambda: op)
        group.finish(op.number)

    def _call_guarded(self, call: Callable[[], T]) -> T:
        """Makes a call; an error in it leaves the workers out of step, and ends the strategy."""
        self._check_usable()
        try:
            return call()
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            is_loss = isinstance(error, WorkerLostError)
            self._groups.drop(Exit(is_loss, f"has given up with {summarize(error)}"))
            if self._replica_sums is not None:
                self._replica_sums.close()

    def call_outermost(self, run: Callable[[], T]) -> T:
        """See ``LocalWorkerGroup``; an error becomes a note in this worker's status."""
        self._check_usable()
        self._heartbeats.note = ""
        try:
            return run()
        except Exception as error:
            if error is not self._failure:
                summary = f"{summarize(error)} at {self._heartbeats.line_of(error)}"
                self._heartbeats.note = f"a run there has raised {summary}"
            raise

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise StrategyError(
                f"this strategy came to its end with {summarize(self._failure)}; end this "
                "process, and start all workers again"
            ) from self._failure
        if self._groups.end is not None:
            raise StrategyError("this strategy is closed; create a new one, on all workers")

    def close(self) -> None:
        """See ``LocalWorkerGroup``."""
        if self._replica_sums is not None:
            self._replica_sums.close()
        self._groups.drop(Exit(is_loss=False, words=f"has closed its strategy at {self._where()}"))
