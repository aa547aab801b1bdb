"""Talk: what workers say to each other by one link, in envelopes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mirror.comm.workers.envelope import Envelope, fingerprint
from mirror.comm.workers.watch import listed
from mirror.errors import DivergenceError

_MAX_SIGNATURE = 120  # letters

# Begins an operation of a process group, said in words, and waits for its end.
Run = Callable[[str, Callable[[Any], dist.Work]], None]


class CheckedGather:
    """Exchanges by one link. See [Note: Envelopes].

    Args:
        where: tells the user's line.
    """

    def __init__(self, run: Run, where: Callable[[], str], size: int) -> None:
        self._run, self._where, self._size = run, where, size
        self._num_exchanges = 0

    def exchange(self, what: str, signature: object, said: bytes) -> list[bytes]:
        """Returns what every worker has said, by rank."""
        self._num_exchanges += 1
        words = f"{what}{_split_by_worker(signature, what)} at {self._where()}"
        mine = Envelope.from_payload(
            fingerprint(self._num_exchanges, what, signature), words, said
        )
        sealed = self._gather(mine.to_bytes(), words)
        envelopes = list(map(Envelope.from_bytes, sealed))
        if any(one.key != mine.key for one in envelopes):
            raise DivergenceError(
                "all workers must reach the same operations in the same order, with the same "
                "shapes; they did not:\n" + listed([one.words for one in envelopes])
            )
        if all(one.payload is not None for one in envelopes):
            return [one.payload or b"" for one in envelopes]
        longest = max(one.length for one in envelopes)
        whole = self._gather(bytearray(said.ljust(longest, b"\0")), words)
        return [raw[: one.length] for raw, one in zip(whole, envelopes, strict=True)]

    def broadcast(self, what: str, raw: Tensor) -> None:
        """Writes worker 0's bytes to those of all, of which there are as many on each."""
        self._run(f"{what} at {self._where()}", lambda group: group.broadcast(raw, 0))

    def _gather(self, mine: bytearray, words: str) -> list[bytes]:
        """Returns every worker's bytes, of which there are as many on each."""
        own = torch.frombuffer(mine, dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self._size)]
        self._run(words, lambda group: group.allgather([every], [own]))
        return [raw.numpy().tobytes() for raw in every]


def _split_by_worker(signature: object, what: str) -> str:
    """Returns what an operation is of, in words, if its name does not say it already."""
    if signature is None or isinstance(signature, str) or " of " in what:
        return ""
    words = repr(signature)
    return f" of {words if len(words) <= _MAX_SIGNATURE else words[: _MAX_SIGNATURE - 3] + '...'}"
