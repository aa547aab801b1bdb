"""A communicator whose collectives have to end in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mirror.comm.base import Communicator
from mirror.concurrency.watchdog import WatchedCall


class TimeoutCommunicator(Communicator):
    """Breaks off what another communicator does for too long, in whatever thread.

    Its collectives raise ``CollectiveTimeoutError`` then, once ``abort`` has ended them. What
    devices do behind a call that has returned is not watched.

    Args:
        inner: the one that does it.
        timeout_seconds: how long a collective may take.
    """

    concurrent = True  # turns are taken inside

    def __init__(self, inner: Communicator, timeout_seconds: float) -> None:
        super().__init__(inner.devices)
        self._inner, self._seconds = inner, timeout_seconds
        for name in ("name", "deterministic", "waits", "packs"):
            vars(self)[name] = getattr(inner, name)

    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum", scale: float = 1.0) -> None:
        self._call("all_reduce", lambda: self._inner.all_reduce(tensors, op, scale), tensors)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self._call("broadcast", lambda: self._inner.broadcast(tensors, root), tensors)

    def reduce_scatter(self, tensors: Sequence[Tensor], op: str = "sum") -> None:
        self._call("reduce_scatter", lambda: self._inner.reduce_scatter(tensors, op), tensors)

    def all_gather(self, tensors: Sequence[Tensor]) -> None:
        self._call("all_gather", lambda: self._inner.all_gather(tensors), tensors)

    def all_reduce_lists(
        self,
        lists: Sequence[Sequence[Tensor]],
        op: str = "sum",
        scale: float = 1.0,
        bytes_per_pack: int = 25 * 2**20,
    ) -> None:
        def work() -> None:
            self._inner.all_reduce_lists(lists, op, scale, bytes_per_pack)

        self._call("all_reduce", work, list(chain(*lists)))

    def all_reduce_checked(
        self,
        columns: Sequence[Sequence[Tensor]],
        op: str,
        scale: float,
        bytes_per_pack: int,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        def work() -> None:
            self._inner.all_reduce_checked(columns, op, scale, bytes_per_pack, wire_dtype)

        self._call("all_reduce", work, list(chain(*columns)))

    def prepare(self, reductions: Iterable[tuple[str, torch.dtype]]) -> None:
        self._inner.prepare(reductions)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        before, self._seconds = self._seconds, seconds
        try:
            with self._inner.within(seconds):
                yield
        finally:
            self._seconds = before

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()

    def __repr__(self) -> str:
        return repr(self._inner)

    def _call(self, name: str, work: Callable[[], Any], tensors: Sequence[Tensor]) -> None:
        WatchedCall(
            work, self._seconds, self._inner.abort, lambda: self._raise_timeout(name, tensors)
        ).make()

    def _raise_timeout(self, name: str, tensors: Sequence[Tensor]) -> str:
        """Returns what a collective is of, in words."""
        num_replicas = len(self.devices)
        mine = tensors[: len(tensors) // num_replicas]
        shapes = ", ".join(f"{str(t.dtype)[6:]} {list(t.shape)}" for t in mine[:4])
        more = f" and {len(mine) - 4} more" if len(mine) > 4 else ""
        devices = ", ".join(map(str, self.devices))
        return (
            f"{name} of {shapes}{more} over {num_replicas} replicas ({devices}) by the backend "
            f"{self.name!r}"
        )
