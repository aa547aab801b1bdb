"""One process that reads as a worker of several, without the other workers."""

from mirror.comm.workers.checked_gather import deserialize, serialize
from mirror.comm.workers.worker_group import LocalWorkerGroup


class Pretended(LocalWorkerGroup):
    """Worker ``rank`` of several; it receives its own messages as those of the other workers."""

    def __init__(self, rank, counts):
        self._set_counts(rank, counts)

    def exchange(self, what, signature=None, payload=bytes):
        return [payload()] * self.size

    def exchange_tensors(self, what, signature, tensors, numbers=()):
        return [deserialize(serialize(tensors, numbers)) for _ in range(self.size)]
