"""What other ways to use many devices put around a module, or into a loader: refused, or told.

``nn.DataParallel`` and ``DistributedDataParallel`` would copy or reduce what is mirrored already;
a ``DistributedSampler`` leaves out what the other processes would read, and there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from mirror.concurrency.stack import warn_user
from mirror.data.samplers import SHARDED, reads_a_shard
from mirror.errors import StrategyError
from mirror.replica.routing import owner_of
from mirror.torch_private import wrap_once

_WRAPPERS = (DataParallel, DistributedDataParallel)
_IN_TRAINER = (
    ": transformers' Trainer does so where it sees several GPUs. Say that one is enough before "
    "the Trainer is made, arguments = TrainingArguments(...); arguments.n_gpu; "
    "arguments._n_gpu = 1; the batch, which is split over all of them, is then "
    "per_device_train_batch_size"
)


def refuse_wrapper(module: nn.Module, path: str) -> None:
    """Raises StrategyError for a module that shares work out itself."""
    if isinstance(module, _WRAPPERS):
        kind = type(module).__name__
        raise StrategyError(
            f"{path or 'the module'} is a {kind}, which shares the work out itself; mirror the "
            "module inside it instead: strategy.mirror(model.module)"
        )


def watch_wrappers() -> None:
    """Has wrappers around mirrored modules refused, and sharded samplers told; once, for good."""
    for wrapper in _WRAPPERS:
        wrap_once(wrapper, "__init__", _refusing_init)
    wrap_once(DistributedSampler, "__iter__", _telling_iter)


def _refusing_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        inside = module.modules() if isinstance(module, nn.Module) else ()
        counts = [owner.num_replicas for m in inside if (owner := owner_of(m)) is not None]
        if max(counts, default=1) > 1:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            raise StrategyError(
                f"{type(self).__name__} was put around a mirrored module, whose calls are split "
                f"over the {max(counts)} replicas already; leave it out"
                + (_IN_TRAINER if caller == "transformers.trainer" else "")
            )
        original(self, module, *args, **kwargs)

    return __init__


def _telling_iter(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def __iter__(self: DistributedSampler[Any]) -> Iterator[Any]:
        if reads_a_shard(self) and torch.utils.data.get_worker_info() is None:
            warn_user(SHARDED.format(self.num_replicas))
        return original(self)

    return __iter__
