"""A communicator that fails in one of its calls."""

import threading
import time

import torch

from mirror import comm
from mirror.comm.communicator import Communicator
from mirror.errors import BackendError

FAULTS = ("raises before", "raises after", "corrupts", "delays", "hangs")


class InjectedError(Exception):
    """What a communicator raises that is told to."""


class Faulty(Communicator):
    """Sums as "naive" does, until call number ``at``, counted from when ``arm`` was called.

    Attributes:
        num_calls: how many there were since then.
        hung: set while a call hangs.
    """

    waits = False  # keeps no deadline of its own
    longest_hang = 100

    def __init__(self, devices):
        super().__init__(devices)
        self._inner = comm.create("naive", devices)
        self._aborted = threading.Event()
        self.hung = threading.Event()
        self.arm(None, -1)

    def arm(self, fault, at):
        self._fault, self._at, self.num_calls = fault, at, 0

    @property
    def was_reached(self):
        return self.num_calls > self._at >= 0

    def _call(self, tensors, work):
        fault = self._fault if self.num_calls == self._at else None
        self.num_calls += 1
        if fault == "raises before":
            raise InjectedError
        if fault == "delays":
            time.sleep(0.003)
        if fault == "hangs":
            self.hung.set()
            self._aborted.wait(self.longest_hang)
            raise BackendError("aborted")
        work()
        if fault == "corrupts":
            spoiled = tensors[-1].view(-1)[:1].view(torch.uint8)
            spoiled[-1:] ^= 1
        if fault == "raises after":
            raise InjectedError

    def all_reduce(self, tensors, op="sum", scale=1.0):
        self._call(tensors, lambda: self._inner.all_reduce(tensors, op, scale))

    def broadcast(self, tensors, root=0):
        self._call(tensors, lambda: self._inner.broadcast(tensors, root))

    def reduce_scatter(self, tensors, op="sum"):
        self._call(tensors, lambda: self._inner.reduce_scatter(tensors, op))

    def all_gather(self, tensors):
        self._call(tensors, lambda: self._inner.all_gather(tensors))

    def abort(self):
        self._aborted.set()
