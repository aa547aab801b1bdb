"""Implements ``all_reduce`` and ``all_gather`` of a replica context.

Each call is one merge point; there one fused reduction combines the tensors of all replicas, and
then of all workers. Results are differentiable, see ``autograd_nodes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.base.timeline import CROSS, REDUCTION
from mirror.comm.reduce_ops import check_axis, check_reducible, reduce_op, reduce_tensors
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica
from mirror.replica.collectives.autograd_nodes import (
    CollectiveEnd,
    CollectiveState,
    refuse_backward,
)
from mirror.replica.collectives.over_workers import (
    Participants,
    gather_over_workers,
    reduce_over_workers,
)
from mirror.replica.params.mirrored_tensor import resolve_copies
from mirror.threads.merge_point import MergePoint
from mirror.values import describe_structure, is_number, leaves_of, rebuild_structure

Payloads = dict[int, list[Tensor]]


def all_reduce(replica: Replica, op: Any, value: Any) -> Any:
    """See ``ReplicaContext.all_reduce``."""
    op = reduce_op(op)
    tensors = _tensors(value, replica.device)
    for tensor in tensors:
        check_reducible(tensor)
    if replica.tracing is not None:
        return rebuild_structure(value, replica.tracing.all_reduce(op, tensors))
    structure = describe_structure(value)
    shapes = tuple((t.dtype, t.shape) for t in tensors)
    name, signature, replicas = f"all_reduce({op})", (structure, shapes), replica.replicas
    detail = _detail(tensors, structure)

    def reduce(payloads: Payloads, participants: Participants) -> tuple[Payloads, Participants]:
        what = f"{name} of {detail}"
        return all_reduce_payloads(replicas, op, payloads, participants, what, signature)

    reduced, state, _ = _merge(replica, name, detail, signature, tensors, reduce)
    if op in ("sum", "mean"):
        scale = 1.0 / state.participants.num_replicas if op == "mean" else 1.0
        end = CollectiveEnd(state, replica, weighted_sum_over_replicas, scale=scale)
        reduced = _connect(end, tensors, reduced)
    elif state.participants.differentiable:
        name = f"all_reduce({op!r})"
        reduced = [refuse_backward(t, name) if _floats(t) else t for t in reduced]
    return rebuild_structure(value, reduced)


def all_gather(replica: Replica, value: Any, axis: int = 0) -> Any:
    """See ``ReplicaContext.all_gather``."""
    if replica.tracing is not None:
        replica.tracing.refuse(
            "all_gather, whose result depends on the sizes of all parts,",
            "gather what the step returns with strategy.gather, or all_reduce sums",
        )
    check_axis(axis)
    tensors = _tensors(value, replica.device)
    axes = [_axis(tensor, axis) for tensor in tensors]
    # Sizes along the axis may differ.
    structure = describe_structure(value)
    rest = [(t.dtype, t.shape[:a], t.shape[a + 1 :]) for t, a in zip(tensors, axes, strict=True)]
    signature, workers = (structure, axis, tuple(rest)), replica.replicas.workers

    def gather(payloads: Payloads, participants: Participants) -> tuple[Payloads, Participants]:
        gathered = {
            r: [
                torch.cat([part[i].to(mine[i].device) for part in payloads.values()], a)
                for i, a in enumerate(axes)
            ]
            for r, mine in payloads.items()
        }
        if not workers.is_multi_process:
            return gathered, participants
        own = _first_payload(gathered)
        what = f"all_gather of {_detail(tensors, structure, axes)}"
        whole, participants = gather_over_workers(
            workers, axes, what, signature, own, participants
        )
        return _copy_to_all(replica.replicas, payloads, whole), participants

    detail = _detail(tensors, structure)
    gathered, state, shapes = _merge(replica, "all_gather", detail, signature, tensors, gather)
    before = [r for r in state.active if r < replica.replica_id]
    starts = state.participants.starts or [0] * len(axes)
    parts = [
        (a, starts[i] + sum(shapes[r][i][a] for r in before), tensors[i].shape[a])
        for i, a in enumerate(axes)
        if _floats(tensors[i])
    ]
    end = CollectiveEnd(state, replica, weighted_sum_over_replicas, parts=parts)
    return rebuild_structure(value, _connect(end, tensors, gathered))


def weighted_sum_over_replicas(replica: Replica, grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns, at replica s, the sum over r of ``(w_r / w_s) g_r``."""
    own = replica.weight if replica.replicas.weighted else 1.0
    # Each replica multiplies by its own weight here: weights may change until the merge.
    weighed = [grad * own if own else torch.zeros_like(grad) for grad in grads]
    totals: list[Tensor] = all_reduce(replica, "sum", weighed)
    # The gradients of a replica with weight zero are multiplied by zero in the end.
    return [total / own if own else torch.zeros_like(total) for total in totals]


def all_reduce_payloads(
    replicas: Replicas,
    op: str,
    payloads: Payloads,
    participants: Participants,
    what: str,
    signature: object,
) -> tuple[Payloads, Participants]:
    """Reduces lists of tensors over the replicas of all workers.

    Args:
        payloads: the tensors of each replica of this worker.
        participants: the replicas of this worker that take part.
        what: the operation's name in messages between workers.
        signature: a value that must be equal on all workers.

    Returns:
        The results of each replica, and the participants of all workers.
    """
    if not replicas.workers.is_multi_process:
        return fused_all_reduce(replicas, op, payloads), participants
    ready = {r: [_mean_ready(t, op) for t in mine] for r, mine in payloads.items()}
    sum_or_op = "sum" if op == "mean" else op
    own = _first_payload(fused_all_reduce(replicas, sum_or_op, ready))
    whole, participants = reduce_over_workers(
        replicas.workers, sum_or_op, what, signature, own, participants
    )
    if op == "mean":
        whole = [total / participants.num_replicas for total in whole]
    return _copy_to_all(replicas, payloads, whole), participants


def fused_all_reduce(replicas: Replicas, op: str, payloads: Payloads) -> Payloads:
    """Reduces lists of tensors over replicas, with one collective per dtype and position."""
    sum_or_op = "sum" if op == "mean" else op
    ids = list(payloads)
    outputs: Payloads = {
        r: [t if t.is_sparse else _mean_ready(t, op).clone() for t in payloads[r]] for r in ids
    }
    for i, tensor in enumerate(outputs[ids[0]]):
        if tensor.is_sparse or tensor.is_complex():
            total = reduce_tensors([outputs[r][i] for r in ids], tensor.device, sum_or_op)
            for r in ids:
                outputs[r][i] = total.to(outputs[r][i].device, copy=True)
    for dtype, device in dict.fromkeys((t.dtype, t.device) for t in outputs[ids[0]]):
        which = [
            i
            for i, t in enumerate(outputs[ids[0]])
            if t.dtype == dtype and t.device == device and not t.is_sparse and not t.is_complex()
        ]
        if which:
            replicas.timeline.begin(CROSS, REDUCTION, f"all_reduce({op})")
            buffers = [torch.cat([outputs[r][i].reshape(-1) for i in which]) for r in ids]
            _reduce_buffers(replicas, buffers, ids, sum_or_op)
            replicas.timeline.end(CROSS, REDUCTION)
            for r, buffer in zip(ids, buffers, strict=True):
                pieces = buffer.split([outputs[r][i].numel() for i in which])
                for i, piece in zip(which, pieces, strict=True):
                    outputs[r][i] = piece.view(outputs[r][i].shape)
    if op == "mean":
        outputs = {r: [t / len(ids) for t in tensors] for r, tensors in outputs.items()}
    return outputs


def _detail(tensors: Sequence[Tensor], structure: str, axes: Sequence[int] = ()) -> str:
    """Returns a description of the tensors, without their sizes along ``axes``."""
    shapes: list[list[Any]] = [list(tensor.shape) for tensor in tensors]
    for shape, axis in zip(shapes, axes, strict=False):
        shape[axis] = "..."
    of = ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
        for tensor, shape in zip(tensors, shapes, strict=True)
    )
    return of if structure == "*" else f"{structure} with {of}"


def _merge(
    replica: Replica,
    name: str,
    detail: str,
    signature: Any,
    tensors: Sequence[Tensor],
    action: Callable[[Payloads, Participants], tuple[Payloads, Participants]],
) -> tuple[list[Tensor], CollectiveState, dict[int, list[torch.Size]]]:
    """Runs ``action`` once on all replicas' tensors; also returns the shapes on each replica."""

    def act(payloads: dict[int, Any]) -> dict[int, Any]:
        participants = Participants(len(payloads), any(wanted for _, wanted in payloads.values()))
        with torch.no_grad():
            results, participants = action(
                {r: mine for r, (mine, _) in payloads.items()}, participants
            )
        state = CollectiveState(tuple(payloads), participants)
        shapes = {r: [tensor.shape for tensor in mine] for r, (mine, _) in payloads.items()}
        return {r: (result, state, shapes) for r, result in results.items()}

    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    payload = ([tensor.detach() for tensor in tensors], wanted)
    merged: tuple[list[Tensor], CollectiveState, dict[int, list[torch.Size]]] = replica.run.merge(
        replica.replica_id, MergePoint(name, signature, payload, act, detail)
    )
    return merged


def _first_payload(payloads: Payloads) -> list[Tensor]:
    return next(iter(payloads.values()))


def _copy_to_all(replicas: Replicas, ids: Iterable[int], tensors: list[Tensor]) -> Payloads:
    """Returns the tensors for all replicas: themselves for the first one, then copies."""
    first, *rest = ids
    copies = {r: [t.to(replicas.devices[r], copy=True) for t in tensors] for r in rest}
    return {first: tensors, **copies}


def _connect(end: CollectiveEnd, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """Connects the floating outputs to their inputs in the autograd graph."""
    which = [i for i, output in enumerate(outputs) if _floats(output)]
    connected = end.connect([inputs[i] for i in which], [outputs[i] for i in which])
    outputs = list(outputs)
    for i, output in zip(which, connected, strict=True):
        outputs[i] = output
    return outputs


def _tensors(value: Any, device: torch.device) -> list[Tensor]:
    tensors = []
    for leaf in leaves_of(value):
        if not isinstance(leaf, Tensor) and not is_number(leaf):
            raise TypeError(
                f"collectives take tensors and numbers, nested; got a {type(leaf).__name__}"
            )
        resolved = resolve_copies(leaf)
        tensors.append(
            resolved if isinstance(resolved, Tensor) else torch.as_tensor(resolved, device=device)
        )
    return tensors


def _axis(tensor: Tensor, axis: int) -> int:
    if tensor.dim() == 0:
        raise ValueError("all_gather needs tensors of one dimension or more, got a 0-d one")
    if not -tensor.dim() <= axis < tensor.dim():
        raise ValueError(
            f"axis {axis} is out of range for a tensor of shape {tuple(tensor.shape)}"
        )
    return axis % tensor.dim()


def _mean_ready(tensor: Tensor, op: str) -> Tensor:
    exact = op == "mean" and not _floats(tensor)
    return tensor.to(torch.get_default_dtype()) if exact else tensor


def _floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _reduce_buffers(replicas: Replicas, buffers: list[Tensor], ids: list[int], op: str) -> None:
    """Reduces one buffer per participating replica, in place."""
    if len(ids) == replicas.num_replicas:  # a communicator needs a buffer of every replica
        replicas.communicator.all_reduce(buffers, op)
        return
    total = reduce_tensors(buffers, buffers[0].device, op)
    for buffer in buffers:
        buffer.copy_(total)
