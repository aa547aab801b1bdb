"""StepReductions: reduces the local gradients of compiled steps over the replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mirror.compiler.capture.tracer import CollectivePoint
from mirror.compiler.step_inputs import StateTensor
from mirror.errors import GradientError
from mirror.execution.replicas import Replicas
from mirror.replica.gradients.non_finite import NonFinite, NonFiniteCheck
from mirror.replica.gradients.ready_grads import MovedTensors, Reducer

_WHAT = "gradients of a compiled step"


class StepReductions:
    """Reduces the local gradients of compiled programs, by the rules of uncompiled steps.

    Args:
        reducer: sums over the replicas.
        finite: checks that gradients are finite before they are reduced; ``None``: no check.

    Attributes:
        may_raise: whether gradients that are not finite are an error.
    """

    def __init__(
        self, replicas: Replicas, reducer: Reducer, finite: NonFiniteCheck | None
    ) -> None:
        self._replicas, self._reducer, self._finite = replicas, reducer, finite
        self.may_raise = finite is not None
        self._workers, self._unfit = replicas.workers, NonFinite(replicas.workers, finite)

    def reduce(
        self, local: dict[int, list[Tensor]], shares: dict[int, float], collective: CollectivePoint
    ) -> dict[int, list[Tensor]]:
        """Returns the weighted sums of all workers, on each replica that takes part, and device.

        Raises:
            GradientError: a gradient on any worker is not finite, and the check is on.
            WorkerLostError: a worker has exited.
        """
        if self._finite is not None:
            try:
                self._check(self._finite, local, shares, collective)
            except GradientError as error:
                self._unfit.found = error
            self._unfit.exchange()
        scale, n = 1.0, self._replicas.num_replicas
        counted = set(shares.values())
        if len(counted) == 1 and 0.0 not in counted:
            (scale,) = counted
        else:
            for r, grads in local.items():
                _weigh(grads, shares[r])
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
        self._sum(moved, scale)
        return dict(enumerate(columns))

    def _sum(self, columns: Sequence[list[Tensor]], scale: float) -> None:
        """Sums over the replicas of all workers, in place. See [Note: Sums on GPUs]."""
        workers, sent = self._workers, columns
        if workers.sums_replicas:
            for column in columns if scale != 1.0 else ():
                torch._foreach_mul_(column, scale)
        else:
            self._reducer.all_reduce(MovedTensors(columns, [], range(len(columns[0]))), scale)
            if not workers.is_multi_process:
                return
            sent = columns[:1]
        flats = [[self._flatten(tensor) for tensor in column] for column in sent]
        waits = [
            workers.all_reduce_replicas(_WHAT, each)
            if workers.sums_replicas
            else workers.all_reduce(_WHAT, each[0])
            for each in zip(*flats, strict=True)
        ]
        for wait in waits:
            wait()
        for r, column in enumerate(columns):
            for tensor, flat in zip(column, flats[min(r, len(flats) - 1)], strict=True):
                if tensor.data_ptr() != flat.data_ptr():
                    tensor.copy_(flat.view(tensor.shape))

    def _flatten(self, tensor: Tensor) -> Tensor:
        """Returns a tensor as it is sent, flat and in the wire dtype."""
        wire = self._reducer.wire_dtype
        return tensor.reshape(-1) if wire is None else tensor.reshape(-1).to(wire)

    def _check(
        self,
        finite: NonFiniteCheck,
        local: dict[int, list[Tensor]],
        shares: dict[int, float],
        collective: CollectivePoint,
    ) -> None:
        counted = [local[r] if shares.get(r) else [] for r in range(self._replicas.num_replicas)]
        if not finite.all_finite(counted):
            columns = [
                [
                    grads[i].reshape(-1)[at : at + math.prod(shape)]
                    for i, at, shape in collective.packing
                ]
                if grads
                else []
                for grads in counted
            ]
            finite.raise_error(columns, [_NamedGradient(place) for place in collective.places])


def _weigh(grads: list[Tensor], share: float) -> None:
    if share:
        torch._foreach_mul_(grads, share)
    else:
        torch._foreach_zero_(grads)  # what counts nothing may be NaN


class _NamedGradient:
    """A parameter with its name for errors."""

    def __init__(self, place: StateTensor) -> None:
        self._tensor = place.owner
        self.name = "?" if place.record is None else place.record.name

    def owner(self) -> Tensor:
        return self._tensor
