"""Reductions: the local gradients of a compiled step, reduced over the replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mirror.execution.replicas import Replicas
from mirror.execution.run import shares_of
from mirror.replica.collectives.reducer import Moved, Reducer
from mirror.replica.finite import Finite
from mirror.steps.following.tracing import Meeting
from mirror.steps.places import Place


class Reductions:
    """Reduces what compiled programs leave of gradients, by the rules of every other reduction.

    Args:
        reducer: sums over the replicas.
        finite: what looks whether gradients are, before they are reduced.
    """

    def __init__(self, replicas: Replicas, reducer: Reducer, finite: Finite | None) -> None:
        self._replicas, self._reducer, self._finite = replicas, reducer, finite

    def shares(self, active: Sequence[int], weights: Sequence[float] | None) -> dict[int, float]:
        """Returns what each replica's gradient counts for. See [Note: Shares]."""
        counting = {r: 1.0 if weights is None else weights[r] for r in active}
        return shares_of(counting, weighted=self._replicas.weighted)

    def reduce(
        self, local: dict[int, list[Tensor]], shares: dict[int, float], meeting: Meeting
    ) -> dict[int, list[Tensor]]:
        """Returns the weighted sums, on each replica that takes part, and on every device.

        Raises:
            GradientError: one is not finite, and that is looked at.
        """
        if self._finite is not None:
            self._check(self._finite, local, shares, meeting)
        scale, n = 1.0, self._replicas.num_replicas
        counted = set(shares.values())
        if len(counted) == 1:
            (scale,) = counted
        else:
            for r, grads in local.items():
                torch._foreach_mul_(grads, shares[r])
        any_of = next(iter(local.values()))
        columns = list(local.values())
        if len(columns) < n:  # the others get the sum, too
            devices = self._replicas.devices
            columns = [
                local.get(r) or [torch.zeros_like(g, device=devices[r]) for g in any_of]
                for r in range(n)
            ]
        # In place, of complex ones too; communicators know real numbers.
        moved = columns
        if any(grad.is_complex() for grad in any_of):
            moved = [
                [torch.view_as_real(g) if g.is_complex() else g for g in column]
                for column in columns
            ]
        self._reducer.all_reduce(Moved(moved, [], range(len(any_of))), scale)
        return dict(enumerate(columns))

    def _check(
        self,
        finite: Finite,
        local: dict[int, list[Tensor]],
        shares: dict[int, float],
        meeting: Meeting,
    ) -> None:
        counted = [local[r] if shares.get(r) else [] for r in range(self._replicas.num_replicas)]
        if not finite.are(counted):
            columns = [
                [
                    brought[i].reshape(-1)[at : at + math.prod(shape)]
                    for i, at, shape in meeting.lie
                ]
                if brought
                else []
                for brought in counted
            ]
            finite.refuse(columns, [_Named(place) for place in meeting.places])


class _Named:
    """A parameter, as errors name it."""

    def __init__(self, place: Place) -> None:
        self._tensor = place.owner
        self.name = "?" if place.record is None else place.record.name

    def owner(self) -> Tensor:
        return self._tensor
