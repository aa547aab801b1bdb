"""Balance: shares of unlike devices that follow their measured speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data.input_options import InputOptions

# Steps over which speeds are measured before the shares may change.
STEPS = 10
# A change must promise this much of the step's time, or it is noise.
MIN_GAIN = 0.05
# How far the shares move towards the measured optimum at once.
STRIDE = 0.5


class Balance:
    """Splits batches so that the replicas finish together; see ``InputOptions(weights="auto")``.

    Starts with equal shares. The time that a replica needs per example is measured over ``STEPS``
    steps; if sharing by speed would make the slowest replica faster by more than ``MIN_GAIN``,
    the shares move ``STRIDE`` of the way there, and the measurement starts again. Results stay
    exact, because gradients are weighted by the numbers of examples; but which example is
    computed where depends on the clock, so runs are no longer equal bit for bit.

    Args:
        num_replicas: of the strategy.
        busy_seconds: gives the seconds that each replica has computed since the strategy began.
    """

    def __init__(self, num_replicas: int, busy_seconds: Callable[[], Sequence[float]]) -> None:
        self._busy_seconds = busy_seconds
        self._shares = (1.0 / num_replicas,) * num_replicas
        self._steps = 0
        self._begun: tuple[float, ...] = ()
        self._examples = [0] * num_replicas

    @property
    def shares(self) -> tuple[float, ...]:
        """The replicas' shares of a batch; they sum to 1."""
        return self._shares

    def record(self, sizes: Sequence[int]) -> None:
        """Notes that the step on a batch of parts of these sizes begins, so the last has ended."""
        if self._steps == STEPS:
            self._adapt()
            self._steps = 0
        if self._steps == 0:
            self._begun = tuple(self._busy_seconds())
            self._examples = [0] * len(self._shares)
        self._steps += 1
        self._examples = [a + b for a, b in zip(self._examples, sizes, strict=True)]

    def _adapt(self) -> None:
        busy = [b - a for a, b in zip(self._begun, self._busy_seconds(), strict=True)]
        if not all(self._examples) or not all(seconds > 0 for seconds in busy):
            return  # someone sat out, or nothing ran on the replicas: nothing is known
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
    """Shares that stay.

    Attributes:
        shares: the replicas' shares of a batch, ``None`` for equal ones.
    """

    shares: Sequence[float] | None = None


def balance_of(
    options: InputOptions,
    workers: LocalWorkerGroup,
    num_local: int,
    *,
    joins: bool,
    measure: Callable[[], Callable[[], Sequence[float]]] | None,
) -> Balance | FixedBalance:
    """Returns what gives the shares: of all workers' replicas, or, measured, of the local ones.

    Raises:
        ValueError: the weights do not go with the replicas, or with ``joins``.
    """
    weights = options.weights
    if weights is None:
        return FixedBalance()
    if joins:
        raise ValueError(
            "weights split global batches; with distribute_dataset_from_function the batches are "
            "the replicas' own: make them of unlike sizes instead"
        )
    if isinstance(weights, str):
        if measure is None:
            raise ValueError("weights='auto' needs a strategy that measures its replicas")
        if workers.is_multi_process and options.sharding != "off":
            raise ValueError(
                "weights='auto' follows what this worker measures, and all workers must split a "
                "batch alike; give one number per replica of all workers, or batches of each "
                "worker's own with sharding='off'"
            )
        return Balance(num_local, measure())
    if len(weights) != workers.num_replicas:
        raise ValueError(
            f"weights must be one per replica, {workers.num_replicas} of them; got "
            f"{len(weights)}: {weights}"
        )
    return FixedBalance(weights)
