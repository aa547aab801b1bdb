"""LocalWorkerGroup: the interface of the workers of a strategy, for a single process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_MAX_RUN_WEIGHTS = 64  # runs between two reductions of gradients


class Message(NamedTuple):
    """The message of one worker in an exchange.

    Attributes:
        tensors: CPU tensors of any shapes.
        numbers: further numbers.
    """

    tensors: list[Tensor]
    numbers: tuple[float, ...]


class LocalWorkerGroup:
    """A group of one worker: its collectives return immediately.

    A *worker* is a process with its own replicas; all workers run the same program. Replica r of
    this worker is replica ``replica_offset + r`` of all.

    Attributes:
        rank: of this worker, from 0; worker 0 is the chief, which writes files.
        size: the number of workers.
        is_multi_process: whether there are several workers.
        counts: the number of replicas of each worker.
        replica_offset: the index of this worker's first replica among all.
        num_replicas: the number of replicas of all workers.
        weight: the sum of this worker's weights in its last outermost run. A backward pass outside
            ``run`` has this weight.
        run_weights: the same for each run in grad mode since the last reduction of gradients.
        num_runs: the number of outermost runs that have ended; equal on all workers.
        num_steps: the number of steps of mirrored optimizers; equal on all workers.
        agreed: the number of steps after which the workers last added up their weights, and the
            sum.
        sums_replicas: whether ``all_reduce_replicas`` can be called.
    """

    sums_replicas = False

    def __init__(self, num_local: int) -> None:
        self._set_counts(0, (num_local,))

    def _set_counts(self, rank: int, counts: Sequence[int]) -> None:
        self.rank, self.size, self.counts = rank, len(counts), tuple(counts)
        self.is_multi_process = len(counts) > 1
        self.replica_offset, self.num_replicas = sum(counts[:rank]), sum(counts)
        self.weight = float(counts[rank])
        self.num_runs = self.num_steps = 0
        self.run_weights: list[float] = []
        self.agreed = (-1, 0.0)

    def record_run(self, weight: float) -> None:
        """Records that an outermost run has ended, with this worker's weight in it."""
        self.weight, self.num_runs = weight, self.num_runs + 1
        if torch.is_grad_enabled() and len(self.run_weights) < _MAX_RUN_WEIGHTS:
            self.run_weights.append(weight)

    def exchange(
        self, what: str, signature: object = None, payload: Callable[[], bytes] = bytes
    ) -> list[bytes]:
        """Returns the payloads of all workers, by rank.

        All workers call it in the same order, while one thread acts for all local replicas.

        Args:
            what: the name of the operation, for messages.
            signature: must have the same ``repr`` on all workers.
            payload: returns this worker's payload.

        Raises:
            DivergenceError: another worker is in another operation, or has another signature.
            WorkerLostError: a worker is gone, or has been silent for the timeout.
        """
        return [payload()]

    def exchange_tensors(
        self,
        what: str,
        signature: object,
        tensors: Sequence[Tensor],
        numbers: Sequence[float] = (),
    ) -> list[Message]:
        """Returns the tensors and numbers of all workers, by rank.

        Tensors may have any shapes and dtypes; the results are on the CPU. Raises as ``exchange``.
        """
        return [Message([tensor.detach().cpu() for tensor in tensors], tuple(numbers))]

    def all_gather_int(self, what: str, number: int) -> Callable[[], list[int]]:
        """Starts to gather a number of each worker; returns a function that waits for them.

        All workers must start these gathers in the same order.
        """
        return lambda: [number]

    def broadcast(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Broadcasts worker 0's values into all workers' tensors, of equal shapes and dtypes."""

    def all_reduce(self, what: str, buffer: Tensor) -> Callable[[], None]:
        """Starts to sum a flat buffer over the workers, in place.

        All workers must start these sums in the same order.

        Returns:
            A function that waits for the sum.
        """
        return lambda: None

    def all_reduce_replicas(self, what: str, buffers: Sequence[Tensor]) -> Callable[[], None]:
        """Starts to sum flat buffers, one per local replica, over all replicas, in place.

        Callable if ``sums_replicas`` is set. The caller keeps the buffers until the sum is done.

        Returns:
            A function that waits for the sum.
        """
        return lambda: None

    def all_reduce_sum_(self, what: str, buffer: Tensor) -> None:
        """Sums a flat buffer over the workers, in place; the workers have exchanged its size."""

    def call_outermost(self, run: Callable[[], T]) -> T:
        """Calls an outermost run; its error is reported to workers that wait for this one.

        Raises:
            StrategyError: an earlier error has ended the strategy.
        """
        return run()

    def close(self) -> None:
        """Closes the connections; idempotent."""


def move_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors that can be sent: detached, contiguous, on the CPU."""
    with torch.no_grad():
        return [tensor.detach().cpu().contiguous() for tensor in tensors]
