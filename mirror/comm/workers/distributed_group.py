"""DistributedGroup: the worker processes of one training, over torch.distributed.

Process groups and the store are torch.distributed's. A lost worker is detected, see
[Note: Monitored waits], and the launcher (torchrun) starts it again. A ``SequencedGroup`` counts
the operations that are started on one process group.

[Note: One size, one group]
Problem: gloo ends the process when buffers of two sizes meet, and buckets of gradients cannot
wait for an envelope.
Rule: each bucket size has its own process group, created when the size first occurs. If there are
too many sizes, further buckets are announced in an envelope.
Consequence: workers that diverge, for example by reducing gradients of different networks, wait
in two groups, where the wait is detected.

The workers meet through torch's default process group and a fresh part of its store. torchrun
keeps one store for all its attempts. A restarted worker would find addresses of ended workers
there, and would wait for them forever. The attempt's number does not help, because the agents of
several machines count separately. So worker 0 chooses a random prefix, and sends it to each worker
under a key that this worker has chosen. No worker can mistake an old answer for its own.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mirror.base.process_bound import reinit_after_fork
from mirror.base.torch_private import default_store
from mirror.comm.packing import copy_back
from mirror.comm.workers.checked_gather import CheckedGather, deserialize, serialize
from mirror.comm.workers.heartbeat import Exit, HeartbeatStore, LineOf, PendingOp, summarize
from mirror.comm.workers.monitored_wait import BackgroundCall, MonitoredWait, Waitable
from mirror.comm.workers.worker_group import LocalWorkerGroup, Message, move_to_host
from mirror.errors import ClusterError, MirrorError, StrategyError, WorkerLostError

_POLL_SECONDS = 0.002
_PUBLISH_SECONDS = 1.0


class SequencedGroup:
    """A process group in which all workers start the operations in the same order.

    Args:
        name: "NUMBER/...", with the number of the strategy.

    Attributes:
        process_group: torch's group; None until ``Groups.get`` has created it.
    """

    def __init__(self, name: str, heartbeats: HeartbeatStore) -> None:
        self.name = name
        self.process_group: Any = None
        self._heartbeats = heartbeats
        self._num_started = 0
        self._works: dict[int, dist.Work] = {}  # in flight, by number

    def count(self, words: str) -> PendingOp:
        """Counts an operation that is about to start, and returns its description."""
        self._num_started += 1
        self._heartbeats.started[self.name] = self._num_started
        return PendingOp(self.name, self._num_started, words)

    def start(self, words: str, call: Callable[[Any], dist.Work]) -> tuple[dist.Work, PendingOp]:
        """Starts an operation; returns its work and its description."""
        op = self.count(words)
        work = self._works[op.number] = call(self.process_group)
        return work, op

    def start_sum(self, buffer: Tensor) -> tuple[int, dist.Work]:
        """Starts to sum a buffer, as every step does; returns the operation's number and work."""
        number = self._num_started = self._num_started + 1
        self._heartbeats.started[self.name] = number
        work = self._works[number] = self.process_group.allreduce([buffer])
        return number, work

    def finish(self, number: int) -> None:
        """Forgets an operation that is done."""
        self._works.pop(number, None)

    def drop(self, *, leak: bool) -> None:
        """Drops the process group, and leaks it if ``leak`` or if works are in flight.

        The destructor of a process group waits for its works, up to the group's timeout if a
        worker is lost. It would do so wherever the last reference ends, even at exit.
        """
        works, self._works = list(self._works.values()), {}
        group, self.process_group = self.process_group, None
        if leak or not all(work.is_completed() for work in works):
            for leaked in (group, *works):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))


class Groups:
    """The process groups of one strategy, by name.

    Args:
        monitor: waits until all workers have created a group.
        seconds: how long a worker may take to create a group.

    Attributes:
        number: of the strategy.
        end: why the groups were dropped, or None.
    """

    def __init__(self, heartbeats: HeartbeatStore, monitor: MonitoredWait, seconds: float) -> None:
        self.number = heartbeats.next_number()
        self._heartbeats, self._monitor = heartbeats, monitor
        # If this timeout expires, the group is unusable; monitored waits have a shorter one.
        self._timeout = timedelta(seconds=seconds + 60)
        self._groups: dict[str, SequencedGroup] = {}
        self._is_forked = False
        self.end: Exit | None = None
        heartbeats.register(self.number, self)
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Marks the groups of a forked process, which has none of their threads, as unusable."""
        self._is_forked = True

    def get(self, name: str, words: Callable[[], str]) -> SequencedGroup:
        """Returns a group; all workers create it together at its first use."""
        if name not in self._groups:
            group = SequencedGroup(f"{self.number}/{name}", self._heartbeats)
            op = group.count(words())
            try:
                call = BackgroundCall(partial(self._create, group.name))
                group.process_group = self._monitor.wait(call, lambda: op)
            except BaseException:
                # The other workers must not count on this one in this group.
                self._heartbeats.started.pop(group.name, None)
                raise
            self._groups[name] = group
        return self._groups[name]

    def drop(self, end: Exit) -> None:
        """Publishes why the strategy ends here, and drops all groups; idempotent."""
        if self.end is not None:
            return
        self.end = end
        self._heartbeats.end(self.number, end).wait(_PUBLISH_SECONDS)
        while self._groups:
            self._groups.popitem()[1].drop(leak=self._is_forked)

    def _create(self, name: str) -> Any:
        heartbeats = self._heartbeats
        store = PrefixStore(f"mirror/{name}", heartbeats.store)
        # torch's own wait for missing workers has no timeout to set and does not name them.
        store.set(f"here/{heartbeats.rank}", "")
        keys = [f"here/{rank}" for rank in range(heartbeats.size)]
        pause = _POLL_SECONDS
        while not store.check(keys):
            if self.end is not None:
                raise RuntimeError(f"the strategy has ended: {self.end.words}")
            sleep(pause)
            pause = min(2 * pause, 0.1)
        return dist.ProcessGroupGloo(store, heartbeats.rank, heartbeats.size, self._timeout)


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


_PAUSE_SECONDS = 0.02


def store_for_run(store: Store, rank: int, size: int, seconds: float) -> Store:
    """Returns a part of a store that only the workers of this attempt use.

    Raises:
        RuntimeError: a worker has not joined in time.
    """
    own = secrets.token_hex(8)  # must not draw from the training's random generators
    if rank:
        store.set(f"mirror/come/{rank}", own)
        answer = f"mirror/answer/{own}"
        store.wait([answer], timedelta(seconds=seconds))
        fresh = PrefixStore(f"mirror/{store.get(answer).decode()}", store)
        fresh.set(f"here/{rank}", "")
        return fresh
    fresh = PrefixStore(f"mirror/{own}", store)
    deadline, answered = monotonic() + seconds, set[bytes]()
    missing = list(range(1, size))
    while missing:
        for other in missing:
            if store.check([f"mirror/come/{other}"]):
                name = store.get(f"mirror/come/{other}")
                if name not in answered:
                    store.set(f"mirror/answer/{name.decode()}", own)
                    answered.add(name)
        missing = [other for other in missing if not fresh.check([f"here/{other}"])]
        if missing and monotonic() > deadline:
            raise RuntimeError(f"worker {missing[0]} is missing")
        if missing:
            sleep(_PAUSE_SECONDS)
    return fresh


_SLICE = timedelta(seconds=0.5)
# Torch's own timeout should come first: a thread inside torch at exit crashes the process.
_GRACE_SECONDS = 20.0
# At most one; it is replaced if there is another default process group.
_heartbeat_stores: list[tuple[Store, HeartbeatStore]] = []
_given: list[HeartbeatStore] = []  # at most one, of an elastic training


def use_heartbeats(heartbeats: HeartbeatStore | None) -> None:
    """Sets the workers that ``join_rendezvous`` returns, instead of the default process group's.

    A default process group cannot be replaced while a thread may be waiting in it.
    """
    _given[:] = [] if heartbeats is None else [heartbeats]


def join_rendezvous(seconds: float, line_of: LineOf) -> HeartbeatStore:
    """Returns the heartbeat store of all workers; creates the default process group if needed.

    Raises:
        WorkerLostError: a worker has not joined.
    """
    if _given:
        _given[0].line_of = line_of
        return _given[0]
    if not dist.is_initialized():
        call = BackgroundCall(lambda: _init_process_group(seconds))
        deadline = monotonic() + seconds + _GRACE_SECONDS
        while True:
            try:
                call.wait(_SLICE)
                break
            except RuntimeError as error:
                if error is not call.error and monotonic() < deadline:
                    continue
                raise _rendezvous_error(error, seconds) from error
    store = default_store()
    if not _heartbeat_stores or _heartbeat_stores[0][0] is not store:
        _heartbeat_stores[:] = [
            (store, HeartbeatStore(store, dist.get_rank(), dist.get_world_size(), line_of))
        ]
    heartbeats = _heartbeat_stores[0][1]
    heartbeats.line_of = line_of
    return heartbeats


def _rendezvous_error(error: RuntimeError, seconds: float) -> MirrorError:
    """Returns the error for a rendezvous that has failed."""
    reason = str(error).splitlines()[0]
    if "EADDRINUSE" in reason:
        return ClusterError(
            f"worker 0 cannot listen at MASTER_PORT={os.environ.get('MASTER_PORT')}, which "
            f"another process or connection of this machine uses: {reason}; choose another port"
        )
    return WorkerLostError(
        f"not all workers have come to the start within {seconds:g} s: {reason}; start WORLD_SIZE "
        "processes that can reach MASTER_ADDR:MASTER_PORT"
    )


def _init_process_group(seconds: float) -> None:
    """Creates the default process group from the environment variables."""
    timeout = timedelta(seconds=seconds)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    fresh = store_for_run(store, rank, size, seconds)
    dist.init_process_group("gloo", store=fresh, rank=rank, world_size=size, timeout=timeout)
