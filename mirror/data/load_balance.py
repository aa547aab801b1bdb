"""The replicas' shares of a batch: fixed, or following the measured speed of their devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data.input_options import InputOptions

# The number of steps over which speeds are measured before the shares may change.
STEPS = 10
# The least gain, as a part of a step's time, for which shares change; less may be noise.
MIN_GAIN = 0.05
# The part of the way to the measured optimum that shares move in one change.
STRIDE = 0.5


def make_balance(
    options: InputOptions,
    workers: LocalWorkerGroup,
    num_local: int,
    *,
    joins: bool,
    measure: Callable[[], Callable[[], Sequence[float]]] | None,
) -> Balance | FixedBalance:
    """Returns the balance for the options: fixed for all workers' replicas, measured for local.

    Raises:
        ValueError: the weights do not fit the replicas, or ``joins``.
    """
    weights = options.weights
    if weights is None:
        return FixedBalance()
    if joins:
        raise ValueError(
            "weights split global batches; with distribute_dataset_from_function each batch is "
            "for one replica: create batches of different sizes instead"
        )
    if isinstance(weights, str):
        if measure is None:
            raise ValueError("weights='auto' needs a strategy that measures its replicas")
        if workers.is_multi_process and options.sharding != "off":
            raise ValueError(
                "weights='auto' follows this worker's measurements, but all workers must split a "
                "batch in the same way; give one number per replica of all workers, or let each "
                "worker read its own batches with sharding='off'"
            )
        return Balance(num_local, measure())
    if len(weights) != workers.num_replicas:
        raise ValueError(
            f"weights must be one per replica, {workers.num_replicas} of them; got "
            f"{len(weights)}: {weights}"
        )
    return FixedBalance(weights)


class Balance:
    """Splits batches so that the replicas finish together; see ``InputOptions(weights="auto")``.

    Shares start equal. The time that each replica needs per example is measured over ``STEPS``
    steps. If shares by speed would save the slowest replica more than ``MIN_GAIN``, the shares
    move ``STRIDE`` of the way there, and the measurement starts again. Results stay exact, since
    gradients are weighted by the numbers of examples. But the assignment of examples to replicas
    depends on the clock, so two runs are no longer equal bit for bit.

    Args:
        num_replicas: the number of the strategy's replicas.
        busy_seconds: returns the time, in seconds, that each replica has computed so far.
    """

    def __init__(self, num_replicas: int, busy_seconds: Callable[[], Sequence[float]]) -> None:
        self._busy_seconds = busy_seconds
        self._shares = (1.0 / num_replicas,) * num_replicas
        self._steps = 0
        self._busy_at_start: tuple[float, ...] = ()
        self._examples = [0] * num_replicas

    @property
    def shares(self) -> tuple[float, ...]:
        """The replicas' shares of a batch; they sum to 1."""
        return self._shares

    def record(self, sizes: Sequence[int]) -> None:
        """Records the start of a step on parts of these sizes, and the end of the last step."""
        if self._steps == STEPS:
            self._adapt()
            self._steps = 0
        if self._steps == 0:
            self._busy_at_start = tuple(self._busy_seconds())
            self._examples = [0] * len(self._shares)
        self._steps += 1
        self._examples = [a + b for a, b in zip(self._examples, sizes, strict=True)]

    def _adapt(self) -> None:
        busy = [b - a for a, b in zip(self._busy_at_start, self._busy_seconds(), strict=True)]
        if not all(self._examples) or not all(seconds > 0 for seconds in busy):
            return  # a replica was idle, or nothing ran on the replicas: speeds are unknown
        speeds = [n / seconds for n, seconds in zip(self._examples, busy, strict=True)]
        best = [speed / sum(speeds) for speed in speeds]
        slowest = max(busy)
        possible = sum(self._examples) / sum(speeds)
        if possible > slowest * (1 - MIN_GAIN):
            return
        self._shares = tuple(
            share + STRIDE * (b - share) for share, b in zip(self._shares, best, strict=True)
        )


@dataclass(frozen=True)
class FixedBalance:
    """Fixed shares.

    Attributes:
        shares: the replicas' shares of a batch; ``None`` for equal shares.
    """

    shares: Sequence[float] | None = None
