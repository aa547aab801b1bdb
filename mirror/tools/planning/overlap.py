"""Buckets that are reduced while the backward pass brings the next ones, simulated.

    forward  | backward 1   2     3      4 | update
    channel  |          [ 1  ][ 2 ][ 3 ]   [ 4 ]
                                           exposed

Gradients arrive in reverse order of registration, each parameter's after an equal share of the
backward pass. A bucket is closed when the next gradient does not fit; a gradient that is larger
than a bucket has one of its own. There is one channel: one bucket is reduced at a time, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

AllReduce = Callable[[float], float]
"""How long an all-reduce of so many bytes takes."""


@dataclass(frozen=True)
class Communication:
    """What the reductions of one step take.

    Attributes:
        seconds: all of them together.
        exposed_seconds: what of it is left when the backward pass is over.
    """

    seconds: float
    exposed_seconds: float

    @property
    def hidden_share(self) -> float | None:
        """The share that the backward pass hides; ``None`` where nothing is reduced."""
        return 1 - self.exposed_seconds / self.seconds if self.seconds else None


def buckets_of(sizes_bytes: Sequence[float], bucket_bytes: float) -> list[tuple[float, float]]:
    """Returns the buckets in the order of their reduction.

    Args:
        sizes_bytes: of the gradients, in order of registration.
        bucket_bytes: what a bucket holds at most.

    Returns:
        When each is complete, as a share of the backward pass, and its bytes.
    """
    buckets: list[tuple[float, float]] = []
    held = 0.0
    for number, size in enumerate(reversed(sizes_bytes)):
        if held and held + size > bucket_bytes:
            buckets.append((number / len(sizes_bytes), held))
            held = 0.0
        held += size
    if held:
        buckets.append((1.0, held))
    return buckets


def beside_backward(
    buckets: Sequence[tuple[float, float]], backward_seconds: float, all_reduce: AllReduce
) -> Communication:
    """Returns what buckets take that are reduced as soon as they are complete."""
    free = total = 0.0
    for arrived, num_bytes in buckets:
        seconds = all_reduce(num_bytes)
        free = max(free, arrived * backward_seconds) + seconds
        total += seconds
    return _communication(total, free - backward_seconds)


def after_backward(num_bytes: float, all_reduce: AllReduce) -> Communication:
    """Returns what one reduction of everything takes, behind the backward pass."""
    seconds = all_reduce(num_bytes) if num_bytes else 0.0
    return _communication(seconds, seconds)


def _communication(seconds: float, exposed: float) -> Communication:
    return Communication(seconds, min(seconds, max(0.0, exposed)))
