"""libnccl on simulated GPUs: the one of tests/comm/nccl works on their memory, in checked order.

A collective's kernels touch each rank's own memory, on the stream that the rank's call named; a
rank's part ends after the ranks that send to it have begun. NCCL puts the operations of a
communicator in an order of its own on any streams. The operations of a group are enqueued some
time after ncclGroupEnd has returned: nothing may follow on those streams until NCCL has said that
it is.
"""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

from mirror.comm.nccl import clique, libnccl
from mirror.comm.nccl.libnccl import IN_PROGRESS, SUCCESS
from tests.comm.nccl.fake_nccl import FakeNccl
from tests.gpu.fake import FakeGpus
from tests.gpu.order import Agent, Memory

_BYTES = {number: dtype.itemsize for dtype, number in libnccl.DTYPES.items()}
_EVERYBODY = ("ncclAllReduce", "ncclAllGather", "ncclReduceScatter")


class Rank(NamedTuple):
    """A communicator: which of a clique, and on which GPU."""

    clique: bytes
    number: int
    size: int
    device: int


class Part(NamedTuple):
    """What a call has one rank do.

    Attributes:
        touched: memory, begin and end there, and whether it is written.
    """

    rank: Rank
    agent: Agent
    name: str
    arguments: tuple[int, ...]
    touched: list[tuple[Memory, int, int, bool]]

    def waits_for(self) -> set[int]:
        """Returns the ranks that must send data before it can end."""
        every_rank = set(range(self.rank.size))
        if self.name in _EVERYBODY:
            return every_rank
        if self.name == "ncclReduce":
            return every_rank if self.arguments[-1] == self.rank.number else set()
        return {self.arguments[-1]} if self.name != "ncclSend" else set()


def touches(rank, name, arguments):
    """Yields address, number of bytes, and whether they are written."""
    n, is_root = rank.size, arguments[-1] == rank.number
    if name in ("ncclSend", "ncclRecv"):
        address, count, dtype, _ = arguments
        yield address, count * _BYTES[dtype], name == "ncclRecv"
        return
    send, receive, count, dtype = arguments[:4]
    num_bytes = count * _BYTES[dtype]
    if name != "ncclBroadcast" or is_root:
        yield send, num_bytes * (n if name == "ncclReduceScatter" else 1), False
    if name != "ncclReduce" or is_root:
        yield receive, num_bytes * (n if name == "ncclAllGather" else 1), True


class NcclOnGpus:
    """A libnccl for simulated GPUs, as ``library``.

    Attributes:
        enqueued: the names of the functions of all parts so far.
    """

    def __init__(self, gpus: FakeGpus, polls: int) -> None:
        self.fake = FakeNccl()
        self.enqueued: list[str] = []
        self._gpus = gpus
        self._ranks: dict[int, Rank] = {}
        self._last: dict[tuple[bytes, int], dict[Agent, int]] = {}
        self._in_group = threading.local()
        self._in_progress: list[Part] = []
        self._polls, self._polls_left = polls, 0
        self._begun: dict[Agent, int] = {}  # how far streams were when their group ended
        self._real = self.fake.library.functions
        self.library = copy.copy(self.fake.library)
        self.library.functions = {name: self._function(name) for name in self._real}

    def _function(self, name):
        special = {
            "ncclCommInitRankConfig": self._init,
            "ncclGroupEnd": self._end_group,
            "ncclCommGetAsyncError": self._state,
        }
        real = self._real[name]

        def call(*arguments):
            if name != "ncclCommGetAsyncError":
                self._enqueue()  # NCCL's thread finishes, whether or not the host has waited
            if name in special:
                return special[name](real, *arguments)
            if name == "ncclGroupStart":
                self._in_group.parts = []
            if name.endswith(_COLLECTIVES):
                self._in_group.parts.append(self._part(name, *arguments))
            return real(*arguments)

        return call

    def _part(self, name, *arguments):
        *given, handle, stream = arguments
        rank = self._ranks[handle]
        touched = []
        with self._gpus.streams.lock:
            for address, num_bytes, writes in touches(rank, name, given):
                memory, begin = self._gpus.table.memory_at(address)
                touched.append((memory, begin, begin + num_bytes, writes))
        agent = self._gpus.streams.everywhere[rank.device, stream].agent
        return Part(rank, agent, name, tuple(given), touched)

    def _init(self, real, handle, size, unique_id, rank, config):
        result = real(handle, size, unique_id, rank, config)
        device = self._gpus.streams.current_device()
        key = bytes(unique_id.internal)
        self._ranks[handle._obj.value] = Rank(key, rank, size, device)
        return result

    def _end_group(self, real):
        result = real()  # which moves the data at once: it must not be freed before
        parts = self._in_group.parts
        if result != SUCCESS or not parts:
            return result
        with self._gpus.streams.lock:
            self._in_progress, self._polls_left = parts, self._polls
            self._begun = {part.agent: part.agent.now for part in parts}
        if self._polls:
            return IN_PROGRESS
        self._enqueue()
        return SUCCESS

    def _state(self, real, handle, state):
        if self._in_progress and self._polls_left > 0:
            self._polls_left -= 1
            state._obj.value = IN_PROGRESS
            return SUCCESS
        self._enqueue()
        return real(handle, state)

    def _enqueue(self):
        """Does on the streams what is in progress, and tells what it touches."""
        with self._gpus.streams.lock:
            parts, self._in_progress = self._in_progress, []
            for agent, now in self._begun.items():
                if parts and agent.now != now:
                    self._gpus.violations.append(
                        f"work on {agent} is unordered with NCCL's, which was still in progress"
                    )
            begins = {}
            for part in parts:
                self.enqueued.append(part.name)
                part.agent.learn(self._last.get((part.rank.clique, part.rank.device), {}))
                begins.setdefault(part.rank.number, part.agent.snapshot())
            for part in parts:
                self._gpus.order.enqueue(part.agent)
                for other in part.waits_for():
                    part.agent.learn(begins[other])
                for memory, begin, end, writes in part.touched:
                    self._gpus.order.access(
                        part.agent, memory, begin, end, writes=writes, what=part.name
                    )
            for part in parts:
                self._last[part.rank.clique, part.rank.device] = part.agent.snapshot()


_COLLECTIVES = ("AllReduce", "Reduce", "Broadcast", "ReduceScatter", "AllGather", "Send", "Recv")


@contextmanager
def gpus_with_nccl(num_devices, polls=2):
    """Gives simulated GPUs, and NCCL on them, for as long as the context is entered.

    Args:
        polls: how often NCCL says that it is not done.
    """
    with FakeGpus(num_devices) as gpus:
        gpus.nccl = NcclOnGpus(gpus, polls)
        with (
            mock.patch.object(libnccl, "nccl_missing_reason", return_value=None),
            mock.patch.object(libnccl, "nccl_library", return_value=gpus.nccl.library),
            # What the host has seen orders what it enqueues: who watches must not look for it.
            mock.patch.object(clique, "_WATCH_SECONDS", 600.0),
        ):
            yield gpus
        gpus.nccl.fake.assert_nothing_is_left()
