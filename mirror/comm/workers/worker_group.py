"""LocalWorkerGroup: the interface of the workers of a strategy, for a single process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from mirror.base.tree_json import decode, encode
from mirror.errors import CheckpointError

T = TypeVar("T")
Place: TypeAlias = Callable[[Tensor, str], Tensor]

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
        sections: for each of these, the position of its section in the buffers of ``all_gather``.
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
        most = max(counts)  # every worker sends as many sections
        self.sections = tuple(w * most + i for w, n in enumerate(counts) for i in range(n))
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

    def exchange_values(self, what: str, value: Any, place: Place) -> list[Any]:
        """Returns a nested value of each worker, by rank.

        Args:
            value: tensors, numbers, strings, and containers of them: see ``base/tree_json.py``.
            place: called with each tensor and the name of the device on which it was; returns
                the tensor of the result.

        Raises:
            CheckpointError: on all workers, the value of one cannot be sent.
            As ``exchange``.
        """
        tensors: list[Tensor] = []

        def put(tensor: Tensor, path: str) -> str:
            tensors.append(tensor)
            return str(len(tensors) - 1)

        error: CheckpointError | None = None
        try:
            head = json.dumps(encode(value, what, put))
        except CheckpointError as refused:
            error, head, tensors = refused, json.dumps(str(refused)), []
        text = torch.frombuffer(bytearray(head.encode()), dtype=torch.uint8)
        messages = self.exchange_tensors(what, None, [text, *tensors], [error is not None])
        if error is not None:
            raise error
        values = []
        for rank, message in enumerate(messages):
            head, received = message.tensors[0].numpy().tobytes().decode(), message.tensors[1:]
            node = json.loads(head)
            if message.numbers[0]:
                raise CheckpointError(f"worker {rank}: {node}")

            def get(name: str, device: str, received: Sequence[Tensor] = received) -> Tensor:
                return place(received[int(name)], device)

            values.append(decode(node, get))
        return values

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

    def all_gather(self, what: str, buffers: Sequence[Tensor]) -> None:
        """Copies every replica's section of a flat buffer to all replicas, in place.

        The workers have exchanged the size. The buffers have ``size * max(counts)`` sections of
        equal size; ``sections`` says which one is whose.

        Args:
            buffers: one for each local replica, on its device, with its section filled.
        """

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
