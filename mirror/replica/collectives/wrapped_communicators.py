"""Communicators that wrap others: one per position of replicas' devices, or with a timeout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mirror.comm.communicator import Communicator
from mirror.device.device_remap import without_remap
from mirror.threads.watchdog import WatchedCall


class PerPositionCommunicator(Communicator):
    """Reduces each tensor between the devices at its position. See [Note: Places].

    Lists of tensors may span several positions. Any other collective concerns one position.

    Args:
        inners: for each position, the communicator of the replicas' devices at it.
    """

    concurrent = True  # turns are taken inside
    packs = False  # a flat buffer lies on one device, and lists may span several

    def __init__(self, inners: Sequence[Communicator]) -> None:
        super().__init__(inners[0].devices)
        self._inners = tuple(inners)
        self._by_device = {device: inner for inner in inners for device in inner.devices}
        names = dict.fromkeys(inner.name for inner in inners)
        vars(self)["name"] = "+".join(names)
        vars(self)["deterministic"] = all(inner.deterministic for inner in inners)
        vars(self)["waits"] = any(inner.waits for inner in inners)

    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum", scale: float = 1.0) -> None:
        with without_remap():
            self._at_position(tensors).all_reduce(tensors, op, scale)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        with without_remap():
            self._at_position(tensors).broadcast(tensors, root)

    def reduce_scatter(self, tensors: Sequence[Tensor], op: str = "sum") -> None:
        with without_remap():
            self._at_position(tensors).reduce_scatter(tensors, op)

    def all_gather(self, tensors: Sequence[Tensor]) -> None:
        with without_remap():
            self._at_position(tensors).all_gather(tensors)

    def all_reduce_lists(
        self,
        lists: Sequence[Sequence[Tensor]],
        op: str = "sum",
        scale: float = 1.0,
        bytes_per_pack: int = 25 * 2**20,
    ) -> None:
        if len({len(column) for column in lists}) != 1 or not lists[0]:
            # This call raises the error that names the mistake.
            self._inners[0].all_reduce_lists(lists, op, scale, bytes_per_pack)
            return
        with without_remap():
            for inner, columns in self._apart(lists):
                inner.all_reduce_lists(columns, op, scale, bytes_per_pack)

    def all_reduce_checked(
        self,
        columns: Sequence[Sequence[Tensor]],
        op: str,
        scale: float,
        bytes_per_pack: int,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        with without_remap():  # the last replica to arrive reduces a bucket for all
            for inner, mine in self._apart(columns):
                inner.all_reduce_checked(mine, op, scale, bytes_per_pack, wire_dtype)

    def prepare(self, reductions: Iterable[tuple[str, torch.dtype]]) -> None:
        wanted = list(reductions)
        for inner in self._inners:
            inner.prepare(wanted)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        with ExitStack() as stack:
            for inner in self._inners:
                stack.enter_context(inner.within(seconds))
            yield

    def abort(self) -> None:
        for inner in self._inners:
            inner.abort()

    def close(self) -> None:
        super().close()
        with ExitStack() as stack:  # closes all of them, also if one raises
            for inner in self._inners:
                stack.callback(inner.close)

    def _at_position(self, tensors: Sequence[Tensor]) -> Communicator:
        if not len(tensors):
            return self._inners[0]
        # The first communicator raises for a device that no replica has.
        return self._by_device.get(tensors[0].device, self._inners[0])

    def _apart(
        self, columns: Sequence[Sequence[Tensor]]
    ) -> list[tuple[Communicator, list[list[Tensor]]]]:
        """Returns each position's communicator with its tensors, a list per replica."""
        which: dict[Communicator, list[int]] = {}
        for i, tensor in enumerate(columns[0]):
            which.setdefault(self._at_position([tensor]), []).append(i)
        return [
            (inner, [[column[i] for i in mine] for column in columns])
            for inner, mine in which.items()
        ]


class TimeoutCommunicator(Communicator):
    """Aborts collectives of another communicator that take too long, in any thread.

    An aborted collective raises ``CollectiveTimeoutError``. Work that devices continue after a
    call has returned is not watched.

    Args:
        inner: the communicator that does the work.
        timeout_seconds: the longest time that a collective may take, in seconds.
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
            work, self._seconds, self._inner.abort, lambda: self._describe(name, tensors)
        ).make()

    def _describe(self, name: str, tensors: Sequence[Tensor]) -> str:
        """Returns a description of a collective, for errors."""
        num_replicas = len(self.devices)
        mine = tensors[: len(tensors) // num_replicas]
        shapes = ", ".join(f"{str(t.dtype)[6:]} {list(t.shape)}" for t in mine[:4])
        more = f" and {len(mine) - 4} more" if len(mine) > 4 else ""
        devices = ", ".join(map(str, self.devices))
        return (
            f"{name} of {shapes}{more} over {num_replicas} replicas ({devices}) by the backend "
            f"{self.name!r}"
        )
