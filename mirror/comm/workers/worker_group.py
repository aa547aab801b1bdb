"""LocalWorkerGroup: the interface of the workers of a strategy, for a single process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_MOST_COUNTED = 64  # calls of one backward pass that are looked at


class Message(NamedTuple):
    """A message from one worker to the others.

    Attributes:
        tensors: CPU tensors of any shapes.
        numbers: further numbers.
    """

    tensors: list[Tensor]
    numbers: tuple[float, ...]


class LocalWorkerGroup:
    """A group of one worker: its collectives return immediately.

    A *worker* is a process with replicas of its own; all run one program. Replica r of this worker
    is replica ``first + r`` of all.

    Attributes:
        rank: this worker's, from 0; worker 0 is the chief, who writes files.
        size: the number of workers.
        is_multi_process: whether there are several workers.
        counts: how many replicas each worker has.
        first: the index of this worker's first replica among all.
        num_replicas: the number of replicas of all workers.
        weight: what this worker's replicas counted for, together, in its last outermost run. A
            backward pass outside ``run`` counts for that.
        counted: the same of the runs, in grad mode, since gradients were reduced last.
        num_runs: how many outermost runs have ended: the same on all workers.
        num_steps: how many steps of mirrored optimizers have begun: the same on all workers.
        agreed: after how many of them all workers' weights were added up last, and their sum.
        reference: the weights of all workers as they were agreed on last; ``None`` before.
        sums_replicas: whether ``all_reduce_replicas`` can be called.
    """

    sums_replicas = False

    def __init__(self, num_local: int) -> None:
        self._have(0, (num_local,))

    def _have(self, rank: int, counts: Sequence[int]) -> None:
        self.rank, self.size, self.counts = rank, len(counts), tuple(counts)
        self.is_multi_process = len(counts) > 1
        self.replica_offset, self.num_replicas = sum(counts[:rank]), sum(counts)
        self.weight = float(counts[rank])
        self.num_runs = self.num_steps = 0
        self.run_weights: list[float] = []
        self.agreed = (-1, 0.0)
        self.reference: float | None = None

    def note_run(self, weight: float) -> None:
        """Notes that an outermost run has ended, and what this worker's counted for."""
        self.weight, self.num_runs = weight, self.num_runs + 1
        if torch.is_grad_enabled() and len(self.run_weights) < _MOST_COUNTED:
            self.run_weights.append(weight)

    def exchange(
        self, what: str, signature: object = None, payload: Callable[[], bytes] = bytes
    ) -> list[bytes]:
        """Gives every worker what each has to say, in the order of their ranks.

        Called where one thread acts for all local replicas, by all workers in the same order.

        Args:
            what: the operation, as messages name it.
            signature: what must be equal on all workers, by its ``repr``.
            payload: makes what is said.

        Raises:
            DivergenceError: another worker is at another operation, or with another signature.
            WorkerLostError: a worker is gone, or none has moved for the timeout.
        """
        return [payload()]

    def exchange_tensors(
        self,
        what: str,
        signature: object,
        tensors: Sequence[Tensor],
        numbers: Sequence[float] = (),
    ) -> list[Message]:
        """Gives every worker the tensors of each, of any shapes and dtypes, on the CPU.

        Raises:
            As ``exchange``.
        """
        return [Message([tensor.detach().cpu() for tensor in tensors], tuple(numbers))]

    def all_gather_int(self, what: str, number: int) -> Callable[[], list[int]]:
        """Begins to tell every worker a number; returns what waits for those of all.

        What one worker tells is begun in the order of that of every other.
        """
        return lambda: [number]

    def broadcast(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Broadcasts worker 0's values into all workers' tensors, of equal shapes and dtypes."""

    def all_reduce(self, what: str, buffer: Tensor) -> Callable[[], None]:
        """Begins to sum a flat buffer over the workers, in place; returns what waits for it.

        The sums of one worker are begun in the order of those of every other.
        """
        return lambda: None

    def all_reduce_replicas(self, what: str, buffers: Sequence[Tensor]) -> Callable[[], None]:
        """Begins to sum flat buffers over all replicas, in place; returns what waits for it.

        Where ``sums_replicas`` is set. Buffers are kept until then.
        """
        return lambda: None

    def all_reduce_sum_(self, what: str, buffer: Tensor) -> None:
        """Sums a flat buffer over the workers, in place: of a size that they have exchanged."""

    def outermost(self, run: Callable[[], T]) -> T:
        """Makes an outermost run; what it raises is noted, for who waits for this worker.

        Raises:
            StrategyError: after an error that is the strategy's end.
        """
        return run()

    def close(self) -> None:
        """Ends the connections; idempotent."""


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors as what can be sent: detached, dense, contiguous, on the CPU."""
    with torch.no_grad():
        return [tensor.detach().cpu().contiguous() for tensor in tensors]
