"""The transparent call: a mirrored module called outside ``run`` splits its call and joins it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from mirror.context import current
from mirror.data.split import split_sizes
from mirror.errors import BatchError, StructureError
from mirror.replica.compiler import Hold, call_held, limits_for, take_hold
from mirror.replica.seams import sewn
from mirror.replica.tensors import MirroredTensor
from mirror.values import ABSENT, PerReplica, is_number, leaves_of, map_structure

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup

# Modules whose batch is not the first dimension, unless they are told so.
_SEQUENCE_FIRST = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def call_in_turn(
    group: ReplicaGroup,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    whole: Callable[..., Any],
    hold: Hold,
) -> Any:
    """Calls a mirrored module in the cross-replica context.

    Tensors that share the first dimension of the first one are split, everything else goes to
    every replica. Runs on the first replica alone what must not be split: torch's losses, whose
    value need not be a mean over examples, a module without variables, a call without batched
    tensors, and a module whose own batch dimension is not the first (an ``nn.LSTM`` without
    ``batch_first``).

    Args:
        whole: calls the module without splitting.
        hold: what the compiler had on the calling thread. See [Note: Compiled calls].

    Raises:
        BatchError: an argument is a PackedSequence, which cannot be split along its data.
    """
    if _is_followed():
        return module._call_impl(*args, **kwargs)
    group.mirror_recorded()
    if group.num_replicas == 1:
        args, kwargs = _moved((args, kwargs), group.devices[0])
        take_hold(hold)
        return whole(*args, **kwargs)
    num_examples = _num_examples(args, kwargs)
    if num_examples is None or not _splits(module):
        group.prepare()
        if _is_lazy(module):
            group.record(module)  # it gets its parameters now, and is mirrored at its next use
        args, kwargs = _moved((args, kwargs), group.devices[0])
        current.in_whole_call = True
        try:
            return whole(*args, **kwargs)
        finally:
            current.in_whole_call = False
    sizes = split_sizes(num_examples, group.num_replicas)
    active = [r for r, size in enumerate(sizes) if size] or [0]
    starts = [sum(sizes[:r]) for r in range(len(sizes))]

    def call(replica_id: int) -> Any:
        part = (starts[replica_id], sizes[replica_id], num_examples)
        own_args, own_kwargs = _part_of((args, kwargs), group.devices[replica_id], *part)
        return call_held(hold, module, own_args, own_kwargs)

    with limits_for(group.num_replicas):
        run = group.run(call, active, weights=sizes)
    return join_outputs(group, run.results, sizes)


def join_outputs(group: ReplicaGroup, results: dict[int, Any], sizes: Sequence[float]) -> Any:
    """Joins the replicas' outputs into what one device would have returned.

    Tensors whose first dimension is the replica's number of examples are concatenated, 0-d
    floating ones become the example-weighted mean, equal other leaves stay; the rest becomes
    PerReplica. Differentiable.

    Raises:
        StructureError: the replicas' outputs differ in structure.
    """
    ids, home = list(results), group.devices[0]
    counts = [sizes[r] for r in ids]
    total = sum(counts)

    def join(*parts: Any) -> Any:
        if all(isinstance(part, Tensor) for part in parts):
            if _is_batched(parts, counts):
                here = [part.to(home) for part in sewn(group, ids, parts)]
                return here[0] if len(here) == 1 else torch.cat(here)
            if total and all(part.dim() == 0 and part.is_floating_point() for part in parts):
                weighted = [
                    part.to(home) * (count / total)
                    for part, count in zip(sewn(group, ids, parts), counts, strict=True)
                ]
                return sum(weighted[1:], start=weighted[0])
        elif all(part is parts[0] for part in parts) or _are_equal(parts):
            return parts[0]
        values: list[Any] = [ABSENT] * len(sizes)
        for replica_id, part in zip(ids, parts, strict=True):
            values[replica_id] = part
        return PerReplica(values, weights=sizes)

    try:
        return map_structure(join, *results.values())
    except StructureError as error:
        raise StructureError(
            f"the replicas' outputs of a split call differ in structure: {error}; return the same "
            "structure for every part of a batch"
        ) from None


def _num_examples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Returns the first dimension of the first tensor that has one."""
    for leaf in leaves_of((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return None if leaf.is_meta else leaf.shape[0]  # of shapes alone there is no part
    return None


def _splits(module: nn.Module) -> bool:
    if isinstance(module, _SEQUENCE_FIRST) and not _batch_first(module):
        return False
    if isinstance(module, nn.modules.loss._Loss):
        return False
    variables = chain(module.parameters(), module.buffers())
    return any(isinstance(v, MirroredTensor) or is_lazy(v) for v in variables)


def _is_followed() -> bool:
    """Whether something follows this thread through one plain module: tracing, torch.func."""
    return (
        torch._C._is_tracing()
        or torch.compiler.is_exporting()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _is_lazy(module: nn.Module) -> bool:
    return any(is_lazy(tensor) for tensor in chain(module.parameters(), module.buffers()))


def _batch_first(module: nn.Module) -> bool:
    inner = getattr(module, "self_attn", module)
    return bool(getattr(inner, "batch_first", False))


def _part_of(tree: Any, device: torch.device, start: int, size: int, total: int) -> Any:
    _refuse_packed(tree)

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, MirroredTensor):
            return leaf
        if leaf.dim() > 0 and leaf.shape[0] == total:
            # narrow, not split: a single view may be changed in place under autograd.
            return leaf.narrow(0, start, size).to(device)
        return leaf.to(device)

    return map_structure(part, tree)


def _moved(tree: Any, device: torch.device) -> Any:
    def move(leaf: Any) -> Any:
        return leaf.to(device) if type(leaf) is Tensor and not leaf.is_meta else leaf

    return map_structure(move, tree)


def _refuse_packed(tree: Any) -> None:
    if isinstance(tree, PackedSequence):
        raise BatchError(
            "a PackedSequence cannot be split over the replicas, its examples are interleaved; "
            "pass the padded tensor and its lengths, and pack inside forward"
        )
    if isinstance(tree, (tuple, list)):
        for item in tree:
            _refuse_packed(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            _refuse_packed(item)


def _is_batched(parts: tuple[Tensor, ...], counts: list[float]) -> bool:
    return all(
        part.dim() > 0 and part.shape[0] == count and part.shape[1:] == parts[0].shape[1:]
        for part, count in zip(parts, counts, strict=True)
    )


def _are_equal(parts: tuple[Any, ...]) -> bool:
    plain = all(is_number(part) or isinstance(part, (str, bytes)) for part in parts)
    return plain and all(type(p) is type(parts[0]) and bool(p == parts[0]) for p in parts)
