"""Finds buffers that the replicas have left different, and logs what that means.

Buffers may differ between replicas. The logger "mirror" warns once for each buffer, and tells of
statistics of normalisations, which are averaged, in a message of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from mirror.base.bitwise import have_equal_numbers

# The first runs that write a buffer are checked. Statistics of batch normalisations, which are
# averaged, get a message of their own, one for all layers. It is a warning under `mirror run`:
# its scripts do not expect replicas. A program that makes a strategy has the default of
# tf.distribute and DistributedDataParallel; there its level is INFO.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (*BATCH_NORMS, *_INSTANCE_NORMS)  # write statistics without a new version
_NUM_CHECKED_RUNS = 2
_logger = logging.getLogger("mirror")
_statistics_level = [logging.INFO]

# The words of the warning, and of `mirror check`.
STATISTICS_OF_PARTS = (
    "{} normalises with mean and variance of its replica's part of the batch, and one device with "
    "those of the whole batch"
)
USE_WHOLE_BATCH = (
    "mirror.nn.convert_sync_batchnorm(model), or mirror run --sync-batch-norm for the unchanged "
    "script"
)


def num_checked_runs(module: nn.Module, name: str) -> int:
    """Returns after how many runs that write a buffer it is checked no more.

    A batch normalisation writes its statistics without a new version. So its counter shows that
    it has run, and stands for them. An instance normalisation averages over examples.
    """
    if isinstance(module, BATCH_NORMS):
        return _NUM_CHECKED_RUNS if name.endswith("num_batches_tracked") else 0
    return 0 if averages_examples(module) else _NUM_CHECKED_RUNS


def averages_examples(module: nn.Module) -> bool:
    """Returns whether a module's floating buffers are moving means over the examples."""
    return isinstance(module, _INSTANCE_NORMS)


def are_different(copies: Sequence[Tensor]) -> bool:
    """Returns whether copies of one buffer differ."""
    return not all(have_equal_numbers(copy, copies[0]) for copy in copies[1:])


def warn_of_buffer(name: str, is_mean: bool) -> None:
    """Logs that the replicas have left a buffer different, and what is kept."""
    _logger.warning(
        "the replicas have left buffer %r different, for each has its part of the batch: what is "
        "kept is %s, which is not what one device has unless it is a mean over examples. Write it "
        "with what all replicas give (all_reduce or all_gather of mirror.get_replica_context()), "
        "or say how to combine it: mirror.set_aggregation(module, name, 'mean'), or 'sum', "
        "'first', 'none'",
        name,
        "the mean of theirs" if is_mean else "the first replica's value",
    )


@contextmanager
def statistics_are_warnings() -> Iterator[None]:
    """Has the message on statistics of parts be a warning inside."""
    _statistics_level.append(logging.WARNING)
    try:
        yield
    finally:
        _statistics_level.pop()


def log_statistics(norm: nn.Module, name: str, num_more: int) -> None:
    """Logs that layers normalise each part of the batch by itself.

    Args:
        norm, name: one of them; of a layer that was mirrored by itself the path is not known.
        num_more: how many others there are.
    """
    layer = f"{type(norm).__name__}({getattr(norm, 'num_features', '')})"
    _logger.log(
        _statistics_level[-1],
        "%s, so training differs from one device's%s; to use the whole batch: %s",
        STATISTICS_OF_PARTS.format(f"{layer} {name!r}" if name else layer),
        f" ({num_more} more such layer{'s' * (num_more > 1)})" if num_more else "",
        USE_WHOLE_BATCH,
    )
