"""DistributedGroup: the worker processes of one training, over torch.distributed.

Process groups and the store are torch.distributed's. A lost worker is detected, see
[Note: Nobody hangs], and the launcher (torchrun) starts it again.

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
from mirror.comm.workers.worker_group import LocalWorkerGroup, Message, on_host
from mirror.comm.workers.worker_rendezvous import join_rendezvous
from mirror.comm.workers.worker_status import Exit, PendingOp
from mirror.errors import StrategyError, WorkerLostError

DEFAULT_SECONDS = 600.0
_MAX_SIZES = 64
_OF_REPLICAS = "sums of replicas"  # which may begin before the next batch on one worker only

T = TypeVar("T")


class ReplicaSums(Protocol):
    """What sums over all replicas: see ``gpu_sums.py``."""

    def begin(self, what: str, buffers: Sequence[Tensor]) -> Waitable[None]:
        """Begins to sum flat buffers, one per local replica, in place."""

    def close(self) -> None:
        """Gives up what is on its way; idempotent."""


class DistributedWorkerGroup(LocalWorkerGroup):
    """Several workers, of which this process is one.

    Uses the default process group, which it creates if there is none, and its own process groups.

    Args:
        num_local: the number of this worker's replicas.
        where: tells the user's line, for messages.
        timeout_seconds: how long to wait for a worker that says nothing; ``None``: 600.
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
        self._board = join_rendezvous(seconds, line_of)
        self.rank, self.size = self._board.rank, self._board.size
        self._watch = MonitoredWait(self._board, seconds)
        self._links = Groups(self._board, self._watch, seconds)
        self._failure: BaseException | None = None
        self._replica_sums: ReplicaSums | None = None
        self._sums: dict[tuple[torch.dtype, int], SequencedGroup] = {}
        let_go = Exit(is_loss=False, words="has let go of its strategy")
        weakref.finalize(self, self._links.drop, let_go).atexit = False
        self._main = self._guarded(lambda: self._link("main", "the start of a strategy"))
        self._talk = CheckedGather(partial(self._run, self._main), where, self.size)
        said = self.exchange("the start of a strategy", None, lambda: b"%d" % num_local)
        self._have(self.rank, [int(count) for count in said])

    def exchange(
        self, what: str, signature: object = None, payload: Callable[[], bytes] = bytes
    ) -> list[bytes]:
        """Gives every worker what each has to say, in the order of their ranks."""
        said = payload()  # what it raises is an error of this worker alone
        return self._guarded(lambda: self._talk.exchange(what, signature, said))

    def exchange_tensors(
        self,
        what: str,
        signature: object,
        tensors: Sequence[Tensor],
        numbers: Sequence[float] = (),
    ) -> list[Message]:
        """Gives every worker the tensors of each, of any shapes and dtypes, on the CPU."""
        said = self.exchange(what, signature, lambda: serialize(tensors, numbers))
        return list(map(deserialize, said))

    def all_gather_int(self, what: str, number: int) -> Callable[[], list[int]]:
        """Begins to tell every worker a number; returns what waits for those of all."""
        return self._all_gather_int("numbers", what, number)

    def _all_gather_int(self, name: str, what: str, number: int) -> Callable[[], list[int]]:
        """Tells it over a link of this name, which has an order of its own."""
        own = torch.tensor([number], device="cpu")
        every = [torch.empty_like(own) for _ in range(self.size)]

        def begun() -> tuple[SequencedGroup, dist.Work, PendingOp]:
            link = self._link(name, what)
            words = f"{what} at {self._where()}"
            return link, *link.begin(words, lambda group: group.allgather([every], [own]))

        link, work, wait = self._guarded(begun)

        def told() -> list[int]:
            self._guarded(lambda: self._finish(link, work, wait))
            return [int(one) for one in every]

        return told

    def broadcast(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Broadcasts worker 0's values into all workers' tensors, of equal shapes and dtypes."""
        described = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
        self.exchange(what, described)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            own = [tensor for tensor in tensors if tensor.dtype == dtype and tensor.numel()]
            if not own:
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in on_host(own)])
            raw = flat.view(torch.uint8)
            self._guarded(partial(self._talk.broadcast, what, raw))
            with torch.no_grad():
                copy_back(flat, [tensor.detach() for tensor in own])

    def all_reduce(self, what: str, buffer: Tensor) -> Callable[[], None]:
        """Begins to sum a flat buffer over the workers, in place; returns what waits for it."""
        host = buffer if buffer.is_cpu else buffer.cpu()
        self._check_usable()
        try:
            link = self._sums.get((host.dtype, host.numel())) or self._link_of_sums(what, host)
            number, work = link.begin_sum(host)
        except BaseException as error:
            self._give_up(error)
            raise

        def finish() -> None:
            self._check_usable()
            try:
                self._watch.wait(work, lambda: PendingOp(link.name, number, what))
            except BaseException as error:
                self._give_up(error)
                raise
            link.ended(number)
            if host is not buffer:
                buffer.copy_(host)

        return finish

    def sum_replicas_by(self, sums: ReplicaSums) -> None:
        """Makes ``all_reduce_replicas`` use these from now on; all workers must call it."""
        self._replica_sums, self.sums_replicas = sums, True

    def all_reduce_replicas(self, what: str, buffers: Sequence[Tensor]) -> Callable[[], None]:
        """Begins to sum flat buffers over all replicas, in place. See [Note: Sums on GPUs]."""
        sums, described = self._replica_sums, f"{buffers[0].dtype}[{buffers[0].numel()}]"
        assert sums is not None
        told = self._all_gather_int(
            _OF_REPLICAS, f"{what} of {described}", zlib.crc32(described.encode())
        )
        on_way = self._guarded(lambda: sums.begin(what, buffers))

        def finish() -> None:
            if len(set(told())) > 1:
                self._guarded(lambda: self._refuse_unlike(f"{what} of {described}"))
            link = self._link(_OF_REPLICAS, what).name
            wait = PendingOp(link, self._board.begun[link], what)
            self._guarded(lambda: self._watch.wait(on_way, lambda: wait))

        return finish

    def _refuse_unlike(self, what: str) -> None:
        """Raises DivergenceError, with where all are: they sum what cannot be summed."""
        self._talk.exchange(what, what, b"")

    def all_reduce_sum_(self, what: str, buffer: Tensor) -> None:
        """Sums a flat buffer over the workers, in place: of a size that they have exchanged."""
        self._guarded(lambda: self._run(self._main, what, lambda group: group.allreduce([buffer])))

    def _link_of_sums(self, what: str, buffer: Tensor) -> SequencedGroup:
        """Returns the link for buffers of a size that is new. See [Note: One size, one group]."""
        size = f"{str(buffer.dtype).removeprefix('torch.')}[{buffer.numel()}]"
        if len(self._sums) < _MAX_SIZES:
            link = self._link(f"sums of {size}", f"{what} of {size}")
            self._sums[buffer.dtype, buffer.numel()] = link
            return link
        self._talk.exchange(what, size, b"")
        return self._link("other sums", what)

    def _link(self, name: str, what: str) -> SequencedGroup:
        return self._links.get(name, lambda: f"{what} at {self._where()}")

    def _run(self, link: SequencedGroup, words: str, call: Callable[[Any], dist.Work]) -> None:
        self._finish(link, *link.begin(words, call))

    def _finish(self, link: SequencedGroup, work: dist.Work, wait: PendingOp) -> None:
        self._watch.wait(work, lambda: wait)
        link.ended(wait.number)

    def _guarded(self, call: Callable[[], T]) -> T:
        """Makes a call; an error in it, Ctrl-C too, leaves the workers out of step for good."""
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
            self._links.drop(Exit(is_loss, f"has given up with {summarize(error)}"))
            if self._replica_sums is not None:
                self._replica_sums.close()

    def outermost(self, run: Callable[[], T]) -> T:
        """Calls an outermost run; publishes its error for workers that wait for this one."""
        self._check_usable()
        self._board.note = ""
        try:
            return run()
        except Exception as error:
            if error is not self._failure:
                said = f"{summarize(error)} at {self._board.line_of(error)}"
                self._board.note = f"a run there has raised {said}"
            raise

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise StrategyError(
                f"this strategy came to its end with {summarize(self._failure)}; end this "
                "process, "
                "and start all workers again"
            ) from self._failure
        if self._links.end is not None:
            raise StrategyError("this strategy is closed; create a new one, on all workers")

    def close(self) -> None:
        """Ends the connections; idempotent."""
        if self._replica_sums is not None:
            self._replica_sums.close()
        self._links.drop(Exit(is_loss=False, words=f"has closed its strategy at {self._where()}"))
