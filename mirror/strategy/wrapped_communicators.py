"""Communicators around others: one per position of the replicas' devices, and one with a timeout.

``WrappedCommunicator`` is their template: every collective is a call of ``_call``, with a tensor
of each replica, or of ``_call_lists``, with a list of tensors of each replica.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mirror.comm.communicator import Communicator
from mirror.device.device_mesh import disabling_remap
from mirror.threads.watchdog import WatchedCall


class WrappedCommunicator(Communicator):
    """Passes every collective on to one of its communicators."""

    concurrent = True  # turns are taken inside

    def __init__(self, inners: Sequence[Communicator]) -> None:
        super().__init__(inners[0].devices)
        self._inners = tuple(inners)
        vars(self)["name"] = "+".join(dict.fromkeys(inner.name for inner in inners))
        vars(self)["deterministic"] = all(inner.deterministic for inner in inners)
        vars(self)["waits"] = any(inner.waits for inner in inners)

    @abstractmethod
    def _call(self, name: str, tensors: Sequence[Tensor], *args: Any) -> None:
        """Calls a collective with a tensor per replica."""

    @abstractmethod
    def _call_lists(self, name: str, lists: Sequence[Sequence[Tensor]], *args: Any) -> None:
        """Calls a collective with a list of tensors per replica."""

    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum", scale: float = 1.0) -> None:
        self._call("all_reduce", tensors, op, scale)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self._call("broadcast", tensors, root)

    def reduce_scatter(self, tensors: Sequence[Tensor], op: str = "sum") -> None:
        self._call("reduce_scatter", tensors, op)

    def all_gather(self, tensors: Sequence[Tensor]) -> None:
        self._call("all_gather", tensors)

    def all_reduce_lists(
        self,
        lists: Sequence[Sequence[Tensor]],
        op: str = "sum",
        scale: float = 1.0,
        bytes_per_pack: int = 25 * 2**20,
    ) -> None:
        self._call_lists("all_reduce_lists", lists, op, scale, bytes_per_pack)

    def all_reduce_checked(
        self,
        columns: Sequence[Sequence[Tensor]],
        op: str,
        scale: float,
        bytes_per_pack: int,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._call_lists("all_reduce_checked", columns, op, scale, bytes_per_pack, wire_dtype)

    def prepare(self, reductions: Iterable[tuple[str, torch.dtype]]) -> None:
        wanted = list(reductions)
        for inner in self._inners:
            inner.prepare(wanted)

    @contextmanager
    def setting_timeout(self, seconds: float) -> Iterator[None]:
        with ExitStack() as stack:
            for inner in self._inners:
                stack.enter_context(inner.setting_timeout(seconds))
            yield

    def abort(self) -> None:
        for inner in self._inners:
            inner.abort()

    def close(self) -> None:
        super().close()
        with ExitStack() as stack:  # closes all of them, also if one raises
            for inner in self._inners:
                stack.callback(inner.close)


class PerPositionCommunicator(WrappedCommunicator):
    """Reduces each tensor between the devices at its position. See [Note: Places].

    Lists of tensors may span several positions. Any other collective concerns one position.

    Args:
        inners: for each position, the communicator of the replicas' devices at it.
    """

    packs = False  # a flat buffer lies on one device, and lists may span several

    def __init__(self, inners: Sequence[Communicator]) -> None:
        super().__init__(inners)
        self._by_device = {device: inner for inner in inners for device in inner.devices}

    def _call(self, name: str, tensors: Sequence[Tensor], *args: Any) -> None:
        with disabling_remap():
            getattr(self._find_inner(tensors), name)(tensors, *args)

    def _call_lists(self, name: str, lists: Sequence[Sequence[Tensor]], *args: Any) -> None:
        if len({len(column) for column in lists}) != 1 or not lists[0]:
            # This call raises the error that names the mistake.
            getattr(self._inners[0], name)(lists, *args)
            return
        indices: dict[Communicator, list[int]] = {}
        for i, tensor in enumerate(lists[0]):
            indices.setdefault(self._find_inner([tensor]), []).append(i)
        with disabling_remap():  # the last replica to arrive reduces a bucket for all
            for inner, at_position in indices.items():
                columns = [[column[i] for i in at_position] for column in lists]
                getattr(inner, name)(columns, *args)

    def _find_inner(self, tensors: Sequence[Tensor]) -> Communicator:
        if not len(tensors):
            return self._inners[0]
        # The first communicator raises for a device that no replica has.
        return self._by_device.get(tensors[0].device, self._inners[0])


class TimeoutCommunicator(WrappedCommunicator):
    """Aborts collectives of another communicator that take too long, in any thread.

    An aborted collective raises ``CollectiveTimeoutError``. Work that devices continue after a
    call has returned is not watched.

    Args:
        inner: the communicator that does the work.
        timeout_seconds: the longest time that a collective may take, in seconds.
    """

    concurrent = True

    def __init__(self, inner: Communicator, timeout_seconds: float) -> None:
        super().__init__([inner])
        self._seconds = timeout_seconds
        vars(self)["packs"] = inner.packs

    def __repr__(self) -> str:
        return repr(self._inners[0])

    @contextmanager
    def setting_timeout(self, seconds: float) -> Iterator[None]:
        before, self._seconds = self._seconds, seconds
        try:
            with super().setting_timeout(seconds):
                yield
        finally:
            self._seconds = before

    def _call(self, name: str, tensors: Sequence[Tensor], *args: Any) -> None:
        work = partial(getattr(self._inners[0], name), tensors, *args)
        self._watch(work, name, tensors)

    def _call_lists(self, name: str, lists: Sequence[Sequence[Tensor]], *args: Any) -> None:
        work = partial(getattr(self._inners[0], name), lists, *args)
        self._watch(work, "all_reduce", list(chain(*lists)))

    def _watch(self, work: partial[None], name: str, tensors: Sequence[Tensor]) -> None:
        abort, describe = self._inners[0].abort, partial(self._describe, name, tensors)
        WatchedCall(work, self._seconds, abort, describe).make()

    def _describe(self, name: str, tensors: Sequence[Tensor]) -> str:
        """Returns a description of a collective, for errors."""
        num_replicas = len(self.devices)
        of_one = tensors[: len(tensors) // num_replicas]
        shapes = ", ".join(f"{str(t.dtype)[6:]} {list(t.shape)}" for t in of_one[:4])
        more = f" and {len(of_one) - 4} more" if len(of_one) > 4 else ""
        devices = ", ".join(map(str, self.devices))
        return (
            f"{name} of {shapes}{more} over {num_replicas} replicas ({devices}) by the backend "
            f"{self.name!r}"
        )
