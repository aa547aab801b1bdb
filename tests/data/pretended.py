"""Workers that are none: what one process of several reads, without the others."""

from mirror.comm.workers.alone import Alone


class Pretended(Alone):
    """Worker ``rank`` of several, whom the others answer what it says itself."""

    def __init__(self, rank, counts):
        self._have(rank, counts)

    def exchange(self, what, signature=None, payload=bytes):
        return [payload()] * self.size
