"""Views: gradients that lie in one buffer with others, and are copied without them.

[Note: Gradients in flat buffers]
Where a backend packs, gradients are moved into flat buffers, are reduced there, and stay there:
``p.grad`` is a view of a buffer, with the strides of the gradient that autograd brought. Nothing
is copied back. The factor of a mean goes with the sum; only NCCL multiplies afterwards.

    moved           where several gradients share a pack of ``bytes_per_pack``
    left in place   a gradient alone in its pack, one with gaps, or whose strides differ between
                    replicas; all of them by "host", which packs nothing
    copied back     with a ``wire_dtype``: the way back is a cast, which writes every byte anyway

To autograd it is no view, but a tensor with a version of its own. Every reduction makes new
buffers, so what somebody has kept of an earlier one is never written to; a ``.grad`` that is there
already is added to. A buffer lives as long as any gradient in it: who keeps one keeps at most
``bytes_per_pack``. A copy or a file would have all of it, too, as torch takes whole storages; so
gradients that leave in the cross-replica context have a say in how they are copied.

On GPUs a buffer belongs to the stream on which it was made, which is one of computation. The
streams of passes, from whose memory gradients were moved and on which they may be used next, are
noted (``Watch.streams``), and the allocator is told of them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


def copy_without_bucket(grad: Tensor) -> Tensor:
    """Has a gradient copied and pickled without what else lies in its storage; returns it."""
    if (
        type(grad) is Tensor
        and grad.layout is torch.strided
        and grad.untyped_storage().nbytes() > grad.nbytes
        and "__deepcopy__" not in grad.__dict__
    ):
        # Both pickle and copy.deepcopy ask the object itself.
        grad.__deepcopy__ = grad.__reduce_ex__ = _CopyWithoutBucket(grad)  # type: ignore[method-assign]
    return grad


class _CopyWithoutBucket:
    """Stands for two methods of a tensor, without which it would be on a circle."""

    __slots__ = ("_grad",)

    def __init__(self, grad: Tensor) -> None:
        self._grad = weakref.ref(grad)

    def __call__(self, how: Any) -> Any:
        """Returns what ``__deepcopy__`` does for a memo, and ``__reduce_ex__`` for a protocol."""
        grad = self._grad()
        if grad is None:
            raise ReferenceError("a gradient is gone that this is a copy of; clone gradients")
        alone = grad.detach().clone().requires_grad_(grad.requires_grad)
        return alone if isinstance(how, dict) else alone.__reduce_ex__(how)
