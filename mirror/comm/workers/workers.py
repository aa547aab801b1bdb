"""Workers: several processes of one training, over torch.distributed.

The engine is torch.distributed's, its process groups and its store: who is lost is found out, and
started again, by whoever started the workers (torchrun).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mirror.comm.packing import copy_back
from mirror.comm.workers.alone import Alone, Parcel, on_host
from mirror.comm.workers.envelope import Envelope, key_of
from mirror.comm.workers.wire import packed, unpacked
from mirror.errors import DivergenceError, WorkerLostError

_DEFAULT_SECONDS = 600.0
_SLICE = timedelta(seconds=2)  # after which one who waits looks where the others are


class Workers(Alone):
    """Several workers, of which this process is one.

    Uses the default process group, and makes it if nobody has; has process groups of its own.

    Args:
        num_local: the number of this worker's replicas.
        where: tells the user's line, for messages.
        timeout_seconds: how long to wait for a worker that says nothing; ``None``: 600.
    """

    def __init__(
        self, num_local: int, where: Callable[[], str], timeout_seconds: float | None
    ) -> None:
        self._where = where
        self._seconds = _DEFAULT_SECONDS if timeout_seconds is None else timeout_seconds
        # Broken for good by a timeout of its own: who waits has a shorter one.
        timeout = timedelta(seconds=self._seconds + 60)
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timeout)
        self._num_exchanges = 0
        # Two, as bucket after bucket may go on beside what the replicas do.
        self._main = dist.new_group(backend="gloo", timeout=timeout)
        self._side = dist.new_group(backend="gloo", timeout=timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        said = self.exchange("the start of a strategy", None, lambda: b"%d" % num_local)
        self._have(self.rank, [int(count) for count in said])

    def exchange(
        self, what: str, signature: object = None, payload: Callable[[], bytes] = bytes
    ) -> list[bytes]:
        """Gives every worker what each has to say, in the order of their ranks."""
        self._num_exchanges += 1
        words, said = f"{what} at {self._where()}", payload()
        mine = Envelope.of(key_of(self._num_exchanges, what, signature), words, said)
        sealed = self._gather(mine.sealed(), words)
        envelopes = list(map(Envelope.opened, sealed))
        if any(one.key != mine.key for one in envelopes):
            raise DivergenceError(
                "all workers must reach the same operations in the same order, with the same "
                "shapes; they did not:\n" + self._told([one.words for one in envelopes])
            )
        if all(one.payload is not None for one in envelopes):
            return [one.payload or b"" for one in envelopes]
        longest = max(one.length for one in envelopes)
        whole = self._gather(bytearray(said.ljust(longest, b"\0")), words)
        return [raw[: one.length] for raw, one in zip(whole, envelopes, strict=True)]

    def exchange_tensors(
        self,
        what: str,
        signature: object,
        tensors: Sequence[Tensor],
        numbers: Sequence[float] = (),
    ) -> list[Parcel]:
        """Gives every worker the tensors of each, of any shapes and dtypes, on the CPU."""
        said = self.exchange(what, signature, lambda: packed(tensors, numbers))
        return list(map(unpacked, said))

    def broadcast(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Writes worker 0's values to the tensors of all, whose shapes and dtypes are equal."""
        described = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
        self.exchange(what, described)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            own = [tensor for tensor in tensors if tensor.dtype == dtype and tensor.numel()]
            if not own:
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in on_host(own)])
            raw = flat.view(torch.uint8)
            self._wait(dist.broadcast(raw, 0, self._main, async_op=True), what)
            with torch.no_grad():
                copy_back(flat, [tensor.detach() for tensor in own])

    def all_reduce(self, what: str, buffer: Tensor) -> Callable[[], None]:
        """Begins to sum a flat buffer over the workers, in place; returns what waits for it."""
        work = dist.all_reduce(buffer, group=self._side, async_op=True)
        return lambda: self._wait(work, what)

    def total(self, what: str, buffer: Tensor) -> None:
        """Sums a flat buffer over the workers, in place: of a size that they have exchanged."""
        self._wait(dist.all_reduce(buffer, group=self._main, async_op=True), what)

    def _gather(self, mine: bytearray, words: str) -> list[bytes]:
        """Returns every worker's bytes, of which there are as many on each."""
        own = torch.frombuffer(mine, dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(dist.all_gather(every, own, self._main, async_op=True), words)
        return [raw.numpy().tobytes() for raw in every]

    def _wait(self, work: dist.Work, words: str) -> None:
        waited = 0.0
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                waited += _SLICE.total_seconds()
                if "timed out" in str(error).lower() and waited < self._seconds:
                    continue
                raise WorkerLostError(
                    f"worker {self.rank} of {self.size} waited in {words}, and a worker is gone: "
                    f"{str(error).splitlines()[0]}"
                ) from error

    def _told(self, words: Sequence[str]) -> str:
        return "\n".join(f"  worker {w} of {self.size}: {at}" for w, at in enumerate(words))
