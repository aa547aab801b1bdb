"""Sharding: the part of a dataset that each of several workers reads."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data.loader_order import samplers_of
from mirror.data.split_batch import Balance, FixedBalance, split_sizes
from mirror.errors import BatchError, short_repr


@dataclass(frozen=True)
class Window:
    """This worker's replicas, among all over which a batch is split.

    Attributes:
        first: this worker's first replica.
        count: the number of this worker's replicas.
        num_replicas: the number of all replicas.
        balance: the shares of all replicas.
    """

    first: int
    count: int
    num_replicas: int
    balance: Balance | FixedBalance

    def sizes(self, num_examples: int) -> tuple[int, ...]:
        """Returns the number of examples of a batch for each of all replicas."""
        return split_sizes(num_examples, self.num_replicas, self.balance.shares)

    def bounds(self, num_examples: int) -> tuple[int, int]:
        """Returns the indices of the window's first example and of the end."""
        sizes = self.sizes(num_examples)
        begin = sum(sizes[: self.first])
        return begin, begin + sum(sizes[self.first : self.first + self.count])


@dataclass(frozen=True)
class Sharding:
    """The data that one worker reads.

    Attributes:
        dataset: the user's dataset, or a shard of it.
        window: the replicas over which a batch is split.
        is_own: whether the batches are this worker's own, instead of the same on all workers.
    """

    dataset: Any
    window: Window
    is_own: bool


def choose_sharding(
    dataset: Iterable[Any],
    policy: str,
    workers: LocalWorkerGroup,
    num_local: int,
    balance: Balance | FixedBalance,
) -> Sharding:
    """Returns this worker's part of a dataset of global batches.

    ============================  ============================================================
    ``policy``                    data that a worker reads
    ============================  ============================================================
    ``"data"``, and ``"auto"``    the examples of its replicas in each global batch, which are
                                  the same on all workers
    ``"file"``                    every ``size``-th record, in batches of its part of the size
    ``"off"``                     its whole dataset: its own batches
    ============================  ============================================================

    A loader with this worker's ``DistributedSampler`` is a shard already: ``"auto"`` reads it as
    ``"off"`` does, and other policies raise, as they would split it twice.

    Raises:
        BatchError: the dataset cannot be read by this policy.
        ValueError: the weights leave this worker without examples of its own batches.
    """
    whole = Window(0, num_local, num_local, balance)
    if not workers.is_multi_process:
        return Sharding(dataset, whole, is_own=False)
    first = workers.replica_offset
    if policy in ("auto", "data"):
        if _is_shard(dataset, policy, workers):
            policy = "off"
        else:
            window = Window(first, num_local, workers.num_replicas, balance)
            return Sharding(dataset, window, is_own=False)

    if policy == "file":
        _is_shard(dataset, policy, workers)
        everyone = Window(first, num_local, workers.num_replicas, balance)
        dataset = _shard(dataset, workers, everyone)
    if isinstance(balance, FixedBalance) and balance.shares is not None:
        balance = FixedBalance(balance.shares[first : first + num_local])
        if not any(balance.shares or ()):
            raise ValueError(
                "a worker with its own batches needs a weight above 0 for one of its replicas; "
                f"worker {workers.rank} has none"
            )
    return Sharding(dataset, Window(0, num_local, num_local, balance), is_own=True)


def _is_shard(dataset: object, policy: str, workers: LocalWorkerGroup) -> bool:
    """Returns whether a loader already reads this worker's shard of the examples.

    Raises:
        BatchError: the loader reads another worker's shard, or would be split a second time.
    """
    samplers = samplers_of(dataset)[0] if isinstance(dataset, DataLoader) else []
    for sampler in samplers:
        if not isinstance(sampler, DistributedSampler) or sampler.num_replicas < 2:
            continue
        is_ours = (sampler.rank, sampler.num_replicas) == (workers.rank, workers.size)
        if policy == "auto" and is_ours:
            return True
        raise BatchError(
            f"a loader with a DistributedSampler reads shard {sampler.rank} of "
            f"{sampler.num_replicas}, and sharding={policy!r} would split it again, for worker "
            f"{workers.rank} of {workers.size}; use the loader without it, with shuffle=True, or "
            "InputOptions(sharding='off')"
        )
    return False


def _shard(dataset: Any, workers: LocalWorkerGroup, window: Window) -> Any:
    if hasattr(dataset, "shard"):
        return dataset.shard(workers.size, workers.rank)
    remedy = (
        "pass a DataLoader over a mirror.data.TFRecordDataset, with batch_size= and shuffle=, or "
        "shard it yourself, by worker, with InputOptions(sharding='off')"
    )
    examples = getattr(dataset, "dataset", None)
    if not isinstance(dataset, DataLoader) or not hasattr(examples, "shard"):
        raise BatchError(
            "sharding='file' takes a loader over a dataset with shard(num_shards, index); got "
            f"{_describe_dataset(dataset, examples)}; {remedy}"
        )
    part: Any = examples.shard(workers.size, workers.rank)  # type: ignore[union-attr]
    sampler = _sampler_over(part, dataset)
    if sampler is None:
        raise BatchError(
            "sharding='file' works with the samplers that batch_size= and shuffle= create; "
            f"this loader has a {type(dataset.sampler).__name__}; {remedy}"
        )
    begin, end = window.bounds(dataset.batch_size or 0)
    if begin == end:
        raise BatchError(
            f"sharding='file' gives each worker its part of the batch size, {dataset.batch_size} "
            f"for all {window.num_replicas} replicas; worker {workers.rank} gets no example; "
            "make the batches larger"
        )
    loader = copy.copy(dataset)
    loader._iterator = None
    batches = BatchSampler(sampler, end - begin, dataset.drop_last)
    # The setter forbids changes; they are safe before the loader's first iteration.
    loader.__dict__.update(
        dataset=part, sampler=sampler, batch_sampler=batches, batch_size=end - begin
    )
    return loader


def _sampler_over(part: Any, loader: DataLoader[Any]) -> Any:
    """Returns the loader's sampler for a part of its dataset; ``None`` for a user's sampler."""
    sampler: Any = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    if isinstance(loader.dataset, IterableDataset):
        return sampler
    if type(sampler) is SequentialSampler:
        return SequentialSampler(part)
    if type(sampler) is RandomSampler and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        return RandomSampler(part, replacement=sampler.replacement, generator=sampler.generator)
    return None


def _describe_dataset(dataset: object, examples: object) -> str:
    if isinstance(dataset, DataLoader):
        return f"a DataLoader over a {type(examples).__name__}"
    return short_repr(dataset)


_MAX_BYTES = 2**16  # the part of a leaf that is hashed


def batch_hash(value: object) -> bytes:
    """Returns a hash of nested values, in 8 bytes; of a large leaf only its beginning is read."""
    digest = hashlib.blake2b(digest_size=8)

    def add(value: object) -> None:
        if isinstance(value, Tensor):
            dense = value.detach().cpu()
            digest.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
            if dense.layout is torch.strided and not dense.is_nested and dense.numel():
                flat = dense.reshape(-1)[: max(1, _MAX_BYTES // dense.element_size())]
                digest.update(flat.contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode())
            if not value.dtype.hasobject:
                digest.update(value.reshape(-1)[: _MAX_BYTES // max(1, value.itemsize)].tobytes())
        elif isinstance(value, Mapping):
            for key in value:
                digest.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            digest.update(b"%d" % len(value))
            for item in value:
                add(item)
        elif value is None or isinstance(value, (str, bytes, int, float)):
            digest.update(repr(value).encode())

    add(value)
    return digest.digest()
