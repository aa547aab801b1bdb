"""Datasets over two devices, with and without prefetching; a process that reads as a worker."""

import threading

import torch

from mirror.comm.workers.checked_gather import deserialize, serialize
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data import DistributedDataset
from mirror.data.input_options import InputOptions

TWO = [torch.device("cpu")] * 2
SECONDS = 30  # of waiting for what comes in milliseconds, before a test fails


def distributed(dataset, prefetch=2, **options):
    return DistributedDataset(dataset, TWO, InputOptions(prefetch=prefetch, **options))


def whole(batch):
    return torch.cat([part for _, part in batch.parts()])


class Gate:
    """A dataset that releases batches one by one, and counts those that were read."""

    def __init__(self, count=10):
        self.count = count
        self.read = 0
        self.arrived = threading.Condition()
        self.allowed = threading.Semaphore(0)

    def __iter__(self):
        for i in range(self.count):
            assert self.allowed.acquire(timeout=SECONDS)
            with self.arrived:
                self.read = i + 1
                self.arrived.notify_all()
            yield torch.full((2,), i)

    def await_read(self, count):
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.read >= count, timeout=SECONDS)


class Broken(Exception):
    pass


class StreamGoesOn:
    """Goes on where it stands, and knows where that is."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 9:
            self.place += 1
            yield torch.full((2,), self.place)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


# One process that reads as a worker of several, without the other workers


class Pretended(LocalWorkerGroup):
    """Worker ``rank`` of several; it receives its own messages as those of the other workers."""

    def __init__(self, rank, counts):
        self._set_counts(rank, counts)

    def exchange(self, what, signature=None, payload=bytes):
        return [payload()] * self.size

    def exchange_tensors(self, what, signature, tensors, numbers=()):
        return [deserialize(serialize(tensors, numbers)) for _ in range(self.size)]
