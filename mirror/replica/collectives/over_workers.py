"""Collectives over workers: what the replicas of each worker have combined becomes that of all.

One thread acts for all replicas of a worker. Workers exchange small tensors, and each worker
combines them in the order of ranks, to the same bits. torch.distributed sums large tensors, after
the workers have checked that they sum the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mirror.comm.reduce_ops import reduce_tensors
from mirror.comm.workers.worker_group import LocalWorkerGroup, Message
from mirror.execution.replicas import Replicas

_MOST_BYTES = 64 * 1024  # up to this size an exchange is as fast as an all-reduce
_SUMMED_ON_THE_WAY = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128, torch.int32, torch.int64),
}
_HALVES = (torch.float16, torch.bfloat16)


class Participants(NamedTuple):
    """The replicas that take part in a collective.

    Attributes:
        num_replicas: their number.
        differentiable: whether the input of any of them requires a gradient.
        starts: in a gather, the index at which this worker's part begins, by tensor.
    """

    num_replicas: int
    differentiable: bool
    starts: Sequence[int] | None = None


def reduce_over_workers(
    workers: LocalWorkerGroup,
    op: str,
    what: str,
    signature: object,
    own: Sequence[Tensor],
    participants: Participants,
) -> tuple[list[Tensor], Participants]:
    """Reduces the workers' results; also returns the participants of all workers."""
    numbers = (participants.num_replicas, participants.differentiable)
    totals, numbers_by_worker = _reduce(workers, op, what, signature, own, numbers)
    return totals, _all_of(numbers_by_worker)


def weighted_sum_over_workers(
    replicas: Replicas, what: str, own: Sequence[Tensor]
) -> list[Tensor]:
    """Returns, at worker w, the sum over workers v of ``(W_v / W_w) own_v``.

    The weights W are those of the workers' last outermost runs: the weights of gradients outside
    ``run``. Where gradients are added, they are 1, or 0 without examples.
    """
    workers, described = replicas.workers, _describe(own)
    numbers = (workers.weight if replicas.weighted else float(workers.weight > 0),)
    return _reduce(workers, "sum", what, described, own, numbers, is_weighted=True)[0]


def gather_over_workers(
    workers: LocalWorkerGroup,
    axes: Sequence[int],
    what: str,
    signature: object,
    own: Sequence[Tensor],
    participants: Participants,
) -> tuple[list[Tensor], Participants]:
    """Concatenates the workers' results in the order of ranks, and returns the participants."""
    pieces = [piece for tensor in own for piece in _pieces(tensor)]
    numbers = (participants.num_replicas, participants.differentiable)
    messages = workers.exchange_tensors(what, signature, pieces, numbers)
    by_worker = [_join(message, own) for message in messages]
    whole = [
        torch.cat([joined[i].to(tensor.device) for joined in by_worker], axes[i])
        for i, tensor in enumerate(own)
    ]
    before = by_worker[: workers.rank]
    starts = [sum(joined[i].shape[a] for joined in before) for i, a in enumerate(axes)]
    return whole, _all_of([message.numbers for message in messages])._replace(starts=starts)


def _reduce(
    workers: LocalWorkerGroup,
    op: str,
    what: str,
    signature: object,
    own: Sequence[Tensor],
    numbers: Sequence[float],
    *,
    is_weighted: bool = False,
) -> tuple[list[Tensor], list[Sequence[float]]]:
    """Returns the reduced tensors, and the numbers of each worker.

    Args:
        is_weighted: whether the first of the numbers is the worker's weight.
    """
    on_the_way = _find_summed_on_the_way(op, own)
    others = [i for i in range(len(own)) if i not in on_the_way]
    sent = [own[i] for i in others]
    pieces = [piece for tensor in sent for piece in _pieces(tensor)]
    layouts = [tensor.layout for tensor in own]
    messages = workers.exchange_tensors(what, (signature, layouts), pieces, numbers)
    numbers_by_worker: list[Sequence[float]] = [message.numbers for message in messages]
    weights = [numbers[0] if is_weighted else 1.0 for numbers in numbers_by_worker]
    largest = max(weights) or 1.0
    scales = [weight / largest for weight in weights]  # 1, and no bit changes, if all are equal
    by_worker = [_join(message, sent) for message in messages]
    totals = list(own)
    for position, i in enumerate(others):
        parts = [joined[position] for joined in by_worker]
        totals[i] = _combine(op, parts, scales, own[i].device)
    for dtype in dict.fromkeys(own[i].dtype for i in on_the_way):
        which = [i for i in on_the_way if own[i].dtype == dtype]
        flat = torch.cat([_scale(own[i], scales[workers.rank]).reshape(-1) for i in which])
        flat = _sum_over_workers(workers, what, flat)
        for i, piece in zip(which, flat.split([own[i].numel() for i in which]), strict=True):
            totals[i] = piece.view(own[i].shape)
    mine = scales[workers.rank]
    if mine != 1.0:
        totals = [total / mine if mine else torch.zeros_like(total) for total in totals]
    return totals, numbers_by_worker


def _find_summed_on_the_way(op: str, tensors: Sequence[Tensor]) -> list[int]:
    """Returns the indices of tensors that are too large to be exchanged."""
    which = [
        i
        for i, tensor in enumerate(tensors)
        if tensor.layout is torch.strided and tensor.dtype in _SUMMED_ON_THE_WAY
    ]
    are_large = op == "sum" and sum(tensors[i].nbytes for i in which) > _MOST_BYTES
    return which if are_large else []


def _sum_over_workers(workers: LocalWorkerGroup, what: str, flat: Tensor) -> Tensor:
    """Returns the sum of the workers' flat buffers, which have one size."""
    wide = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    # A sum of more than two half-precision numbers is rounded once, at the end.
    wide = wide.float() if flat.dtype in _HALVES and workers.size > 2 else wide
    buffer = wide.cpu().contiguous()
    workers.all_reduce_sum_(what, buffer)
    total = buffer.to(flat.device)
    if flat.is_complex():
        return torch.view_as_complex(total.view(-1, 2))
    return total.to(flat.dtype)


def _combine(
    op: str, parts: Sequence[Tensor], scales: Sequence[float], device: torch.device
) -> Tensor:
    """Returns the combined tensors of workers; tensors of scale 0 may be NaN and are left out."""
    dtype = parts[0].dtype
    counted = [_scale(part, scale) for part, scale in zip(parts, scales, strict=True) if scale]
    if not counted:
        return torch.zeros_like(parts[0], device=device)
    if dtype in _HALVES:
        return reduce_tensors([part.float() for part in counted], device, op).to(dtype)
    return reduce_tensors(counted, device, op)


def _scale(tensor: Tensor, scale: float) -> Tensor:
    if scale == 1.0:
        return tensor
    return tensor * scale if scale else torch.zeros_like(tensor)


def _all_of(numbers_by_worker: Sequence[Sequence[float]]) -> Participants:
    return Participants(
        int(sum(numbers[0] for numbers in numbers_by_worker)),
        any(numbers[1] for numbers in numbers_by_worker),
    )


def _describe(tensors: Sequence[Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    return [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Returns the dense tensors that are sent for a tensor."""
    if not tensor.is_sparse:
        return [tensor]
    tensor = tensor.coalesce()
    return [tensor.indices(), tensor.values(), torch.tensor(tensor.shape)]


def _join(message: Message, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors of a message."""
    pieces = iter(message.tensors)
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
