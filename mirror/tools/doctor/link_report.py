"""What the doctor measures between this worker and the others, if they ask a doctor, too."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter

import torch

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.errors import DivergenceError, WorkerLostError

_SECONDS = 30.0
_NUM_EXCHANGES, _NUM_SUMS = 50, 5
_SUM_BYTES = 10 * 10**6


@dataclass(frozen=True)
class LinkReport:
    """What is known of the links between workers.

    Attributes:
        seconds_per_exchange: of an envelope, the median.
        seconds_per_sum: of an all-reduce of ``sum_bytes``, the best.
        missing: why the others were not met; ``None`` if they were. They need not ask a doctor.
        failure: what went wrong; ``None`` if nothing did.
    """

    seconds_per_exchange: float | None = None
    seconds_per_sum: float | None = None
    sum_bytes: int = _SUM_BYTES
    missing: str | None = None
    failure: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Returns everything as JSON can hold it."""
        return asdict(self)

    def render(self) -> Iterator[str]:
        """Yields everything for a terminal."""
        if self.failure is not None:
            yield f"FAILED: {self.failure}"
        elif self.missing is not None:
            yield f"not tested: {self.missing}"
        elif self.seconds_per_exchange is not None and self.seconds_per_sum is not None:
            yield f"an exchange of all workers takes {self.seconds_per_exchange * 1e6:.0f} us"
            rate = self.sum_bytes / self.seconds_per_sum / 1e9
            yield (
                f"an all-reduce of {self.sum_bytes / 1e6:.0f} MB takes "
                f"{self.seconds_per_sum * 1e3:.1f} ms, {rate:.2f} GB/s"
            )


def measure_links(
    num_workers: int,
    tell: Callable[[str], None] | None = None,
    seconds: float | None = None,
) -> LinkReport:
    """Meets the other workers, whose doctors do the same, and measures what lies between.

    torch.distributed knows from the environment where.

    Args:
        tell: is given a line before the others are waited for.
        seconds: how long they are; ``None``: 30.
    """
    if not torch.distributed.is_available():
        return LinkReport(failure="this torch was built without torch.distributed")
    from mirror.comm.workers.distributed_group import DistributedWorkerGroup  # which needs it

    seconds = _SECONDS if seconds is None else seconds
    if tell is not None:
        tell(f"waiting up to {seconds:g} s for the doctors of the other workers")
    try:
        workers = DistributedWorkerGroup(1, lambda: "mirror doctor", seconds)
    except WorkerLostError as error:
        return LinkReport(
            missing=f"{str(error).splitlines()[0]} (mirror doctor tests the links if all "
            f"{num_workers} workers run it at once)"
        )
    try:
        return _measured(workers)
    except (WorkerLostError, DivergenceError) as error:
        return LinkReport(failure=str(error))
    finally:
        workers.close()


def _measured(workers: LocalWorkerGroup) -> LinkReport:
    exchanges = [_timed(lambda: workers.exchange("a test")) for _ in range(_NUM_EXCHANGES)]
    sums = []
    for _ in range(_NUM_SUMS):
        buffer = torch.ones(_SUM_BYTES // 4)
        workers.exchange("a test begins")
        sums.append(_timed(partial(workers.all_reduce_sum_, "a test", buffer)))
        if not torch.equal(buffer, torch.full_like(buffer, workers.size)):
            return LinkReport(failure="what the workers have summed is wrong")
    return LinkReport(statistics.median(exchanges), min(sums))


def _timed(call: Callable[[], object]) -> float:
    begun = perf_counter()
    call()
    return perf_counter() - begun
