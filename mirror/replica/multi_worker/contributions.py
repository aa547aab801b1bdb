"""Summands: what this worker brings to a reduction: its replicas' gradients, weighed, summed."""

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
        columns: real gradients, zeros for what is absent: of each replica, or their sums alone.
        flags: see ``tail.py``.
        scales: what each column is still to be multiplied by.
    """

    columns: Sequence[Sequence[Tensor]]
    flags: Sequence[float]
    scales: Sequence[float]


class Contributions:
    """Makes this worker's summands.

    Args:
        kept_back: what was deferred; what is taken from there is let go.
        streams: of GPUs, those of the passes.
    """

    def __init__(
        self,
        replicas: Replicas,
        reducer: Reducer,
        kept_back: Deferred,
        streams: ReplicaStreams | None,
    ) -> None:
        self._devices, self._workers = replicas.devices, replicas.workers
        self._reducer, self._kept_back, self._streams = reducer, kept_back, streams

    def contribution_of(
        self, bucket: WorkerBucket, columns: list[ReplicaGrads], shares: Mapping[int, float]
    ) -> Contribution:
        """Returns the summand of a bucket.

        Args:
            columns: each replica's gradients; they are the summand's now.
        """
        flags: Sequence[float] = bucket.all_count
        if self._kept_back or not self._all_count(columns, shares):
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
                if share not in (0.0, 1.0):  # of those that count nothing there are zeros
                    torch._foreach_mul_(column, share)
        self._reducer.all_reduce(moved, scale)
        return Contribution(columns[:1], flags, [1.0])

    def usual_scale(
        self, columns: Sequence[ReplicaGrads], shares: Mapping[int, float]
    ) -> float | None:
        """Returns what all replicas' gradients are multiplied by; ``None`` where that differs.

        Nor is there one where some are absent or unusual, or count nothing.
        """
        if self._kept_back.has_passes or len(shares) < len(columns):
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
        """Puts zeros where there is no gradient, or none that counts; returns flags and shares."""
        flags = [0.0] * len(bucket.variables)
        for r, column in enumerate(columns):
            counts = COUNTS if shares.get(r, 0.0) else IS_THERE
            for i, grad in enumerate(column):
                if grad is not None:
                    flags[i] = max(flags[i], counts)
        refuse_graphs(columns)
        if self._kept_back:  # whose passes are weighted already
            weigh(list(columns), shares)
            shares = dict.fromkeys(range(len(columns)), 1.0)
            for i, variable in enumerate(bucket.variables):
                kept = None if variable is None else self._kept_back.pop_dense(variable)
                for column, summand in zip(columns, kept or (), strict=False):
                    column[i] = plus(column[i], summand)
                    flags[i] = COUNTS
        for r, (column, device) in enumerate(zip(columns, self._devices, strict=True)):
            for i, grad in enumerate(column):
                if grad is None or not shares.get(r, 0.0):  # counts nothing, not even a NaN
                    column[i] = bucket.zeros(i, device)
        return flags, shares

    def row(
        self, variable: ReplicatedParam, columns: list[ReplicaGrads], shares: Mapping[int, float]
    ) -> Tensor | None:
        """Returns the summand of one variable, sparse if all replicas' gradients are."""
        refuse_graphs(columns)
        weigh(columns, shares)
        kept = self._kept_back.pop(variable, None) or [None] * len(columns)
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
            "create_graph=True; call backward() without it: what may have a graph are gradients "
            "of the model's inputs, by torch.autograd.grad(..., create_graph=True)"
        )
