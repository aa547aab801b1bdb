"""SyncBatchNorm: batch normalisation over the whole batch, for any split over replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from mirror.base.dynamo import disable_dynamo
from mirror.base.migration_hints import keywords_with_hints
from mirror.base.torch_private import wrap_once
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica, current
from mirror.replica.collectives.collectives import all_reduce

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_batch_norm_of_part = F.batch_norm  # torch's own, also if it is wrapped later


def wrap_torch_sync_batch_norm(owner_of: Callable[[nn.Module], Replicas | None]) -> None:
    """Makes ``torch.nn.SyncBatchNorm`` in mirrored modules compute what ours does. Idempotent.

    Args:
        owner_of: returns the replicas over which a module is mirrored.
    """

    def wrap_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:  # noqa: A002
            owner = owner_of(self)
            if owner is None or not owner.mirrors:
                return original(self, input)
            return _normalize(self, input)

        return forward

    wrap_once(nn.SyncBatchNorm, "forward", wrap_forward)


def synchronize_all() -> None:
    """Makes every batch normalisation inside ``run`` use the whole batch, in the whole process.

    The layers stay of their classes, which may have a forward of their own. It is
    ``convert_sync_batchnorm`` for models that are not made yet.
    """
    wrap_once(F, "batch_norm", _wrap_batch_norm)


def _wrap_batch_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def batch_norm(
        input: Tensor,  # noqa: A002
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        given = running_mean, running_var, weight, bias
        replica = current.replica
        if not training or replica is None or not replica.replicas.mirrors:
            return original(input, *given, training, momentum, eps)
        return _normalize_over_batch(replica, input, *given, momentum, eps)

    return batch_norm


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with the statistics of the whole batch; N replicas equal one device.

    For inputs ``(N, C)`` and ``(N, C, ...)``; the arguments are those of ``nn.BatchNorm2d``. There
    is one collective in the forward and one in the backward pass. Half precision is computed in
    float32. Replicas may have parts of different sizes, or none. In eval mode, and outside
    ``run``, it is ``nn.BatchNorm``; without running statistics, eval mode also takes the
    statistics of the whole batch.

    ``E[x^2] - E[x]^2`` loses all digits if the mean is large. So each replica contributes its
    count, mean and sum of squared deviations, which combine as in Chan, Golub and LeVeque (1979).
    They cannot be summed directly: each replica writes them into its own row of a table of zeros.
    The sum of the tables is exact, and every replica continues from the same bits.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name in torch
        """Normalises the replica's part of the batch.

        Raises:
            ValueError: the input has fewer than two dimensions, or the whole batch has only one
                value per channel.
            DivergenceError: another replica does not call this layer, or has other channels.
        """
        return _normalize(self, input)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


@keywords_with_hints("mirror.nn.convert_sync_batchnorm")
def convert_sync_batchnorm(module: ModuleT) -> ModuleT:
    """Converts every batch normalisation in ``module``, itself included, in place.

    ``nn.BatchNorm1d``, ``2d``, ``3d`` and ``torch.nn.SyncBatchNorm`` objects change their class to
    ``mirror.nn.SyncBatchNorm``. Parameters, buffers, hooks, training flag, device and state_dict
    keys are kept. The module may be mirrored before or after.

    Returns:
        ``module``.

    Raises:
        TypeError: a batch normalisation overrides ``forward``, which would be lost, or is lazy
            and has no parameters yet. The module is unchanged.
    """
    layers = [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)
    ]
    for name, layer in layers:
        where = f"{name or 'the module'} is a {type(layer).__name__}"
        if isinstance(layer, LazyModuleMixin):
            raise TypeError(f"{where} without parameters; call the module once, then convert it")
        if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise TypeError(
                f"{where} with a forward of its own, which converting it would drop; write it on "
                "top of mirror.nn.SyncBatchNorm, or start with mirror run --sync-batch-norm"
            )
    for _, layer in layers:
        layer.__dict__.pop("process_group", None)
        layer.__class__ = SyncBatchNorm
    return module


def _normalize(layer: _BatchNorm, x: Tensor) -> Tensor:
    """Normalises with the whole batch's statistics inside ``run``, else like ``nn.BatchNorm``."""
    replica = current.replica
    if replica is None or not replica.replicas.mirrors or not _is_of_batch(layer):
        return _BatchNorm.forward(layer, x)
    layer._check_input_dim(x)
    running: Any = (None, None, None)
    if layer.training and layer.track_running_stats:
        running = layer.running_mean, layer.running_var, layer.num_batches_tracked
    mean, var, count = running
    options = layer.weight, layer.bias, layer.momentum, float(layer.eps)
    return _normalize_over_batch(replica, x, mean, var, *options, count)


def _is_of_batch(layer: _BatchNorm) -> bool:
    """Whether a layer normalises with the statistics of its batch."""
    return layer.training or (layer.running_mean is None and layer.running_var is None)


@disable_dynamo
def _normalize_over_batch(
    replica: Replica,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | None,
    eps: float,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    """Does what ``F.batch_norm`` does in training, with the statistics of the whole batch.

    Args:
        momentum: ``None``: the running statistics are the mean over all batches, so far.
        num_batches_tracked: is counted up.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    mean, var, count = _whole_batch(replica, wide, x)
    if _num_values(x) < 2:  # only then reads ``count``, which waits for the device
        if replica.tracing is not None:
            replica.tracing.run_uncompiled()
        if count.item() == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{tuple(x.shape)} and at most this on all replicas together"
            )
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(num_batches_tracked)
    if not _num_values(x) and count.item() == 0:
        return _batch_norm_of_part(x, None, None, weight, bias, True, 0.0, eps)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():  # to the same bits on all replicas
            kept, unbiased = 1 - (momentum or 0.0), var * (count / (count - 1))
            for running, value in ((running_mean, mean), (running_var, unbiased)):
                running.mul_(kept).add_(value.to(running.dtype), alpha=momentum or 0.0)
    result: Tensor = _normalization(wide, x, mean, var, weight, bias, eps)
    return result


def _whole_batch(replica: Replica, wide: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, biased variance and count per channel of the batch; differentiable."""
    channels = x.shape[1]
    mean, squares = _deviations(wide, x)
    count = mean.new_full((1,), _num_values(x))
    row = torch.cat([mean, squares, count]).unsqueeze(0)
    table = gather_rows(replica, row)
    means, squares, counts = table.split([channels, channels, 1], dim=1)
    counts = counts.detach()
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    var = (squares + counts * (means - mean).square()).sum(0) / total
    return mean, var, total


def gather_rows(replica: Replica, row: Tensor) -> Tensor:
    """Returns the rows of all replicas of all workers, in their order; differentiable.

    Args:
        row: of this replica, of shape (1, n), and of equal n on all.
    """
    if replica.tracing is not None:
        table = replica.tracing.own_row(row)
    else:
        workers = replica.replicas.workers
        above = workers.replica_offset + replica.replica_id
        table = F.pad(row, (0, 0, above, workers.num_replicas - 1 - above))
    rows: Tensor = all_reduce(replica, "sum", table)
    return rows


class Deviations(torch.autograd.Function):
    """Mean and sum of squared deviations per channel of ``wide``, which is ``x`` in float32.

    Like ``Normalization``, it saves only ``x`` for the backward pass; gradients are float32.
    """

    @staticmethod
    def forward(ctx: Any, wide: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        num_values = _num_values(x)
        if num_values:
            var, mean = torch.var_mean(wide, _all_but_channels(x), correction=0)
        else:
            var = mean = wide.new_zeros(x.shape[1])
        ctx.save_for_backward(x, mean)
        return mean, var * num_values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, mean = ctx.saved_tensors
        of_mean, of_squares = (_view_per_channel(grad, x) for grad in grads)
        centered = x.to(mean.dtype) - _view_per_channel(mean, x)
        return of_mean / max(1, _num_values(x)) + 2 * of_squares * centered, None


class Normalization(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` per channel, in the dtype of ``x``."""

    @staticmethod
    def forward(
        ctx: Any,
        wide: Tensor,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps = eps
        ctx.bias_dtype = None if bias is None else bias.dtype
        affine = [None if p is None else p.to(mean.dtype) for p in (weight, bias)]
        return F.batch_norm(x, mean, var, affine[0], affine[1], False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight = ctx.saved_tensors
        over = _all_but_channels(x)
        grad = grads[0].to(mean.dtype)
        inverse = torch.rsqrt(var + ctx.eps)
        scale = inverse if weight is None else inverse * weight
        summed = grad.sum(over)
        centered = x.to(mean.dtype) - _view_per_channel(mean, x)
        along = (grad * centered).sum(over)  # the component along the deviations
        return (
            grad * _view_per_channel(scale, x),
            None,
            -scale * summed,
            -0.5 * scale * inverse.square() * along,
            None if weight is None else (along * inverse).to(weight.dtype),
            None if ctx.bias_dtype is None else summed.to(ctx.bias_dtype),
            None,
        )


def _num_values(x: Tensor) -> int:
    """Returns the number of values per channel."""
    return x.numel() // x.shape[1] if x.shape[1] else 0


def _all_but_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _view_per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))


# ``apply`` is untyped.
_deviations: Any = Deviations.apply
_normalization: Any = Normalization.apply
