"""Contributions: this worker's part of a reduction, summed over its replicas with their shares.

A dense gradient has a place in a bucket. Sparse gradients are in no bucket: ``sum_sparse``
exchanges their indices and values as tensors of any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from mirror.comm.workers.worker_group import LocalWorkerGroup, Message
from mirror.device.streams import ReplicaStreams
from mirror.errors import StrategyError
from mirror.execution.replicas import Replicas
from mirror.replica.gradients.ready_grads import (
    DeferredGrads,
    Reducer,
    ReplicaGrads,
    add_grads,
    are_usual,
    common_scale,
    sum_present,
    unshare,
    weigh,
)
from mirror.replica.multi_worker.worker_bucket import FLAG_COUNTED, FLAG_ZERO_WEIGHT, WorkerBucket
from mirror.replica.params.replicated_param import ReplicatedParam


class Contribution(NamedTuple):
    """This worker's part of a bucket.

    Attributes:
        by_replica: real gradients with zeros for absent ones; or only their sums.
        flags: one per variable, see ``worker_bucket.py``.
        scales: the factor by which the gradients of each replica are still to be multiplied.
    """

    by_replica: Sequence[Sequence[Tensor]]
    flags: Sequence[float]
    scales: Sequence[float]


class Contributions:
    """Computes this worker's contributions.

    Args:
        deferred: the deferred gradients; a contribution removes those that it contains.
        streams: on GPUs, the streams of the backward passes.
    """

    def __init__(
        self,
        replicas: Replicas,
        reducer: Reducer,
        deferred: DeferredGrads,
        streams: ReplicaStreams | None,
    ) -> None:
        self._devices, self._workers = replicas.devices, replicas.workers
        self._reducer, self._deferred, self._streams = reducer, deferred, streams

    def usual_scale(
        self, by_replica: Sequence[ReplicaGrads], shares: Mapping[int, float]
    ) -> float | None:
        """Returns the common share of all replicas.

        ``None`` if shares differ or are 0, or if a gradient is absent or not dense.
        """
        if self._deferred.has_passes or len(shares) < len(by_replica):
            return None
        scale = shares[0] if len(by_replica) == 1 else common_scale(shares)
        return scale if scale and all(map(are_usual, by_replica)) else None

    def of_bucket(
        self, bucket: WorkerBucket, by_replica: list[ReplicaGrads], shares: Mapping[int, float]
    ) -> Contribution:
        """Returns the contribution to a bucket.

        Args:
            by_replica: the gradients of the bucket, which are overwritten.
        """
        flags: Sequence[float] = bucket.all_count
        all_count = len(shares) == len(by_replica) and all(shares.values())
        if self._deferred.has_passes or not (all_count and all(map(are_usual, by_replica))):
            flags, shares = self._fill_absent(bucket, by_replica, shares)
        if bucket.has_complex:
            by_replica = [*map(bucket.view_as_real, by_replica)]
        num_replicas = len(by_replica)
        if num_replicas == 1 or self._workers.sums_replicas:
            return Contribution(by_replica, flags, [shares[r] for r in range(num_replicas)])
        if flags:
            moved = self._reducer.move(by_replica, self._streams)
            unshare(by_replica, moved.staying, self._streams)
            scale = common_scale(shares)
            if scale is None:
                scale = 1.0
                weigh(by_replica, shares)
            self._reducer.all_reduce(moved, scale)
        return Contribution(by_replica[:1], flags, [1.0])

    def _fill_absent(
        self, bucket: WorkerBucket, by_replica: Sequence[ReplicaGrads], shares: Mapping[int, float]
    ) -> tuple[list[float], Mapping[int, float]]:
        """Replaces gradients that are absent or have no share by zeros.

        Returns:
            The flags, and shares of which none is 0.
        """
        flags = [0.0] * len(bucket.variables)
        for r, grads in enumerate(by_replica):
            flag = FLAG_COUNTED if shares.get(r) else FLAG_ZERO_WEIGHT
            for i, grad in enumerate(grads):
                if grad is not None:
                    flags[i] = max(flags[i], flag)
        refuse_graphs(by_replica)
        if self._deferred.has_passes:  # deferred gradients are weighted already
            weigh(list(by_replica), shares)
            shares = dict.fromkeys(range(len(by_replica)), 1.0)
            for i, variable in enumerate(bucket.variables):
                kept = [] if variable is None else self._deferred.pop_dense(variable)
                for grads, summand in zip(by_replica, kept, strict=False):
                    grads[i] = add_grads(grads[i], summand)
                    flags[i] = FLAG_COUNTED
        for r, (grads, device) in enumerate(zip(by_replica, self._devices, strict=True)):
            for i, grad in enumerate(grads):
                if grad is None or not shares.get(r):  # replaced, since 0 * NaN is NaN
                    grads[i] = bucket.zeros(i, device)
        return flags, {r: shares.get(r) or 1.0 for r in range(len(by_replica))}

    def of_sparse(
        self,
        variable: ReplicatedParam,
        by_replica: list[ReplicaGrads],
        shares: Mapping[int, float],
    ) -> Tensor | None:
        """Returns the contribution to one variable, sparse if all replicas' gradients are."""
        refuse_graphs(by_replica)
        weigh(by_replica, shares)
        kept = self._deferred.pop(variable, None) or [None] * len(by_replica)
        grads = [add_grads(own, kept[r]) for r, (own,) in enumerate(by_replica)]
        return sum_present(grads, self._devices[0])


def refuse_graphs(by_replica: Sequence[ReplicaGrads]) -> None:
    """Raises StrategyError for gradients that carry a graph."""
    if any(grad is not None and grad.requires_grad for grad in chain(*by_replica)):
        raise StrategyError(
            "gradients of several workers carry no graph, but backward was called with "
            "create_graph=True; call backward() without it: only gradients of the model's inputs "
            "may have a graph, by torch.autograd.grad(..., create_graph=True)"
        )


_ABSENT, _SPARSE, _DENSE = 0.0, 1.0, 2.0


def sum_sparse(
    workers: LocalWorkerGroup,
    mine: Sequence[Tensor | None],
    variables: Sequence[ReplicatedParam | None],
) -> list[Tensor | None]:
    """Sums gradients over the workers, each sparse, dense or absent; sparse if all are.

    Args:
        mine: this worker's gradients; None for an absent one.
        variables: their variables; ``None`` for a freed one.
    """
    like = [None if variable is None else variable.targets[0] for variable in variables]
    kinds, tensors = [], list[Tensor]()
    for grad in mine:
        if grad is None:
            kinds.append(_ABSENT)
        elif grad.is_sparse:
            kinds.append(_SPARSE)
            grad = grad.coalesce()
            tensors += [grad.indices(), grad.values()]
        else:
            kinds.append(_DENSE)
            tensors.append(grad)
    every = workers.exchange_tensors("sparse gradients", len(mine), tensors, kinds)
    grads_by_worker = [list(_decode(message, like)) for message in every]
    return [
        None if target is None else sum_present(grads, target.device)
        for grads, target in zip(zip(*grads_by_worker, strict=True), like, strict=True)
    ]


def _decode(message: Message, like: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
    """Yields the gradients of one worker."""
    tensors = iter(message.tensors)
    for kind, target in zip(message.numbers, like, strict=True):
        if kind == _ABSENT:
            yield None
        elif kind == _DENSE:
            yield next(tensors)
        else:
            rows = next(tensors), next(tensors)
            yield (
                None
                if target is None
                else torch.sparse_coo_tensor(*rows, target.shape, check_invariants=False)
            )
