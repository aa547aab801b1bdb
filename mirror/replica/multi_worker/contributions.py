"""Contributions: this worker's part of a reduction, summed over its replicas with their shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mirror.device.current_streams import ReplicaStreams
from mirror.errors import StrategyError
from mirror.execution.replicas import Replicas
from mirror.replica.collectives.packed_reducer import Reducer
from mirror.replica.collectives.reduce_ops import summed
from mirror.replica.gradients.ready_grads import (
    ReplicaGrads,
    are_usual,
    common_scale,
    plus,
    unshare,
    weigh,
)
from mirror.replica.multi_worker.pass_weights import Deferred
from mirror.replica.multi_worker.trailer import COUNTS, IS_THERE
from mirror.replica.multi_worker.worker_bucket import WorkerBucket
from mirror.replica.params.replicated_param import ReplicatedParam


class Contribution(NamedTuple):
    """This worker's part of a bucket.

    Attributes:
        columns: per replica, real gradients with zeros for absent ones; or only their sums.
        flags: one per variable, see ``trailer.py``.
        scales: the factor by which each column is still to be multiplied.
    """

    columns: Sequence[Sequence[Tensor]]
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
        deferred: Deferred,
        streams: ReplicaStreams | None,
    ) -> None:
        self._devices, self._workers = replicas.devices, replicas.workers
        self._reducer, self._deferred, self._streams = reducer, deferred, streams

    def contribution_of(
        self, bucket: WorkerBucket, columns: list[ReplicaGrads], shares: Mapping[int, float]
    ) -> Contribution:
        """Returns the contribution to a bucket.

        Args:
            columns: each replica's gradients, which are overwritten.
        """
        flags: Sequence[float] = bucket.all_count
        if self._deferred or not self._all_count(columns, shares):
            flags, shares = self._filled(bucket, columns, shares)
        if bucket.has_complex:
            columns = [bucket.real(column) for column in columns]
        if self._workers.sums_replicas:
            return Contribution(columns, flags, [shares.get(r, 0.0) for r in range(len(columns))])
        if len(columns) == 1 or not flags:
            return Contribution(columns[:1], flags, [shares.get(0, 0.0)])
        moved = self._reducer.move(columns, self._streams)
        unshare(columns, moved.staying)
        scale = common_scale(shares) if len(shares) == len(columns) else None
        if scale is None:
            scale = 1.0
            for r, column in enumerate(columns):
                share = shares.get(r, 0.0)
                if share not in (0.0, 1.0):  # with share 0 the column is zeros already
                    torch._foreach_mul_(column, share)
        self._reducer.all_reduce(moved, scale)
        return Contribution(columns[:1], flags, [1.0])

    def usual_scale(
        self, columns: Sequence[ReplicaGrads], shares: Mapping[int, float]
    ) -> float | None:
        """Returns the common share of all replicas.

        ``None`` if shares differ or are 0, or if a gradient is absent or not dense.
        """
        if self._deferred.has_passes or len(shares) < len(columns):
            return None
        if len(columns) == 1:
            scale = shares.get(0)
            return scale if scale and are_usual(columns[0]) else None
        scale = common_scale(shares)
        return scale if scale and all(map(are_usual, columns)) else None

    @staticmethod
    def _all_count(columns: Sequence[ReplicaGrads], shares: Mapping[int, float]) -> bool:
        if len(shares) < len(columns) or not all(shares.values()):
            return False
        return all(map(are_usual, columns))

    def _filled(
        self, bucket: WorkerBucket, columns: Sequence[ReplicaGrads], shares: Mapping[int, float]
    ) -> tuple[list[float], Mapping[int, float]]:
        """Replaces gradients that are absent or have no share by zeros; returns flags, shares."""
        flags = [0.0] * len(bucket.variables)
        for r, column in enumerate(columns):
            counts = COUNTS if shares.get(r, 0.0) else IS_THERE
            for i, grad in enumerate(column):
                if grad is not None:
                    flags[i] = max(flags[i], counts)
        refuse_graphs(columns)
        if self._deferred:  # deferred gradients are weighted already
            weigh(list(columns), shares)
            shares = dict.fromkeys(range(len(columns)), 1.0)
            for i, variable in enumerate(bucket.variables):
                kept = None if variable is None else self._deferred.pop_dense(variable)
                for column, summand in zip(columns, kept or (), strict=False):
                    column[i] = plus(column[i], summand)
                    flags[i] = COUNTS
        for r, (column, device) in enumerate(zip(columns, self._devices, strict=True)):
            for i, grad in enumerate(column):
                if grad is None or not shares.get(r, 0.0):  # replaced, since 0 * NaN is NaN
                    column[i] = bucket.zeros(i, device)
        return flags, shares

    def sparse_contribution(
        self, variable: ReplicatedParam, columns: list[ReplicaGrads], shares: Mapping[int, float]
    ) -> Tensor | None:
        """Returns the contribution to one variable, sparse if all replicas' gradients are."""
        refuse_graphs(columns)
        weigh(columns, shares)
        kept = self._deferred.pop(variable, None) or [None] * len(columns)
        own = (column[0] for column in columns)
        grads = [plus(grad, summand) for grad, summand in zip(own, kept, strict=True)]
        present = [grad for grad in grads if grad is not None]
        if not all(grad.is_sparse for grad in present):
            present = [grad.to_dense() if grad.is_sparse else grad for grad in present]
        return summed(present, self._devices[0]) if present else None


def refuse_graphs(columns: Sequence[ReplicaGrads]) -> None:
    """Raises StrategyError for gradients that carry a graph."""
    if any(grad is not None and grad.requires_grad for column in columns for grad in column):
        raise StrategyError(
            "gradients of several workers carry no graph, but backward was called with "
            "create_graph=True; call backward() without it: only gradients of the model's inputs "
            "may have a graph, by torch.autograd.grad(..., create_graph=True)"
        )
