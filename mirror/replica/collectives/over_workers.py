"""Over workers: what a collective does beyond the replicas of this process.

One thread acts for all replicas of a worker, with what they have combined among themselves. Small
tensors go to all workers, and each combines them in the order of ranks, to the same bits; large
sums are left to torch.distributed, once all have agreed on what is to be summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mirror.comm.workers.worker_group import LocalWorkerGroup, Message
from mirror.replica.collectives.reduce_ops import summed

_MOST_BYTES = 64 * 1024  # that are as fast gathered as summed on the way
_SUMMED_ON_THE_WAY = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128, torch.int32, torch.int64),
}
_HALVES = (torch.float16, torch.bfloat16)


class AllWorkersResult(NamedTuple):
    """Who takes part in a collective.

    Attributes:
        num_replicas: how many.
        differentiable: whether any one's input requires a gradient.
        starts: of what is gathered, where this worker's part begins, by tensor.
    """

    num_replicas: int
    differentiable: bool
    starts: Sequence[int] | None = None


def reduced_over(
    workers: LocalWorkerGroup,
    op: str,
    what: str,
    signature: object,
    own: Sequence[Tensor],
    met: AllWorkersResult,
) -> tuple[list[Tensor], AllWorkersResult]:
    """Reduces what each worker's replicas have reduced; also tells who takes part in all."""
    numbers = (met.num_replicas, met.differentiable)
    totals, told = _reduced(workers, op, what, signature, own, numbers)
    return totals, _all_of(told)


def weighted_over(workers: LocalWorkerGroup, what: str, own: Sequence[Tensor]) -> list[Tensor]:
    """Returns, at worker w, the sum over workers v of ``(W_v / W_w) own_v``.

    With the weights of their last outermost runs: what a gradient outside ``run`` counts for.
    """
    described = _described(own)
    numbers = (workers.weight,)
    return _reduced(workers, "sum", what, described, own, numbers, is_weighted=True)[0]


def gathered_over(
    workers: LocalWorkerGroup,
    axes: Sequence[int],
    what: str,
    signature: object,
    own: Sequence[Tensor],
    met: AllWorkersResult,
) -> tuple[list[Tensor], AllWorkersResult]:
    """Concatenates what each worker's replicas have gathered, in the order of their ranks."""
    pieces = [piece for tensor in own for piece in _pieces(tensor)]
    numbers = (met.num_replicas, met.differentiable)
    parcels = workers.exchange_tensors(what, signature, pieces, numbers)
    columns = [_join(parcel, own) for parcel in parcels]
    whole = [
        torch.cat([column[i].to(tensor.device) for column in columns], axes[i])
        for i, tensor in enumerate(own)
    ]
    before = columns[: workers.rank]
    starts = [sum(column[i].shape[a] for column in before) for i, a in enumerate(axes)]
    return whole, _all_of([parcel.numbers for parcel in parcels])._replace(starts=starts)


def _reduced(
    workers: LocalWorkerGroup,
    op: str,
    what: str,
    signature: object,
    own: Sequence[Tensor],
    numbers: Sequence[float],
    *,
    is_weighted: bool = False,
) -> tuple[list[Tensor], list[Sequence[float]]]:
    """Also returns everybody's numbers, the first of which is the weight where there are some."""
    on_the_way = _summed_on_the_way(op, own)
    others = [i for i in range(len(own)) if i not in on_the_way]
    sent = [own[i] for i in others]
    pieces = [piece for tensor in sent for piece in _pieces(tensor)]
    layouts = [tensor.layout for tensor in own]
    parcels = workers.exchange_tensors(what, (signature, layouts), pieces, numbers)
    told: list[Sequence[float]] = [parcel.numbers for parcel in parcels]
    weights = [numbers[0] if is_weighted else 1.0 for numbers in told]
    largest = max(weights) or 1.0
    scales = [weight / largest for weight in weights]  # 1, and no bit changes, if all are equal
    columns = [_join(parcel, sent) for parcel in parcels]
    totals = list(own)
    for position, i in enumerate(others):
        parts = [column[position] for column in columns]
        totals[i] = _combined(op, parts, scales, own[i].device)
    for dtype in dict.fromkeys(own[i].dtype for i in on_the_way):
        which = [i for i in on_the_way if own[i].dtype == dtype]
        flat = torch.cat([_scaled(own[i], scales[workers.rank]).reshape(-1) for i in which])
        flat = _summed_by_all(workers, what, flat)
        for i, piece in zip(which, flat.split([own[i].numel() for i in which]), strict=True):
            totals[i] = piece.view(own[i].shape)
    mine = scales[workers.rank]
    if mine != 1.0:
        totals = [total / mine if mine else torch.zeros_like(total) for total in totals]
    return totals, told


def _summed_on_the_way(op: str, tensors: Sequence[Tensor]) -> list[int]:
    """Returns which tensors are too large to be gathered from all."""
    which = [
        i
        for i, tensor in enumerate(tensors)
        if tensor.layout is torch.strided and tensor.dtype in _SUMMED_ON_THE_WAY
    ]
    are_large = op == "sum" and sum(tensors[i].nbytes for i in which) > _MOST_BYTES
    return which if are_large else []


def _summed_by_all(workers: LocalWorkerGroup, what: str, flat: Tensor) -> Tensor:
    """Returns the sum of the workers' flat buffers, which have one size."""
    wide = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    # A sum of many halves is rounded once.
    wide = wide.float() if flat.dtype in _HALVES and workers.size > 2 else wide
    buffer = wide.cpu().contiguous()
    workers.all_reduce_sum_(what, buffer)
    total = buffer.to(flat.device)
    if flat.is_complex():
        return torch.view_as_complex(total.view(-1, 2))
    return total.to(flat.dtype)


def _combined(
    op: str, parts: Sequence[Tensor], scales: Sequence[float], device: torch.device
) -> Tensor:
    """Returns workers' tensors combined, those that count nothing left out: they may be NaN."""
    dtype = parts[0].dtype
    counted = [_scaled(part, scale) for part, scale in zip(parts, scales, strict=True) if scale]
    if not counted:
        return torch.zeros_like(parts[0], device=device)
    if dtype in _HALVES:
        return summed([part.float() for part in counted], device, op).to(dtype)
    return summed(counted, device, op)


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    if scale == 1.0:
        return tensor
    return tensor * scale if scale else torch.zeros_like(tensor)


def _all_of(told: Sequence[Sequence[float]]) -> AllWorkersResult:
    return AllWorkersResult(
        int(sum(numbers[0] for numbers in told)), any(numbers[1] for numbers in told)
    )


def _described(tensors: Sequence[Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    return [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Returns what is sent of a tensor."""
    if not tensor.is_sparse:
        return [tensor]
    tensor = tensor.coalesce()
    return [tensor.indices(), tensor.values(), torch.tensor(tensor.shape)]


def _join(parcel: Message, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors of which a parcel has the pieces."""
    pieces = iter(parcel.tensors)
    tensors = []
    for tensor in like:
        if tensor.is_sparse:
            indices, values, shape = next(pieces), next(pieces), next(pieces)
            size = [int(n) for n in shape]
            joined = torch.sparse_coo_tensor(
                indices, values, size, is_coalesced=True, check_invariants=False
            )
            tensors.append(joined)
        else:
            tensors.append(next(pieces))
    return tensors
