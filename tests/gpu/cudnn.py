"""The simulated cuDNN: recurrent layers that want their weights in one buffer.

It moves weights as the real one does: below Python, by setting the data of each tensor that it
gets, whatever class that has. The gradients of a layer's weights are views of one buffer, too.
Values come from the CPU's kernels. What it does not show: cuDNN's own dropout, whose state a GPU
keeps, and bits.
"""

from __future__ import annotations

import warnings
from functools import partial
from math import prod
from typing import Any

import torch
import torch.backends.cudnn.rnn
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import handle_torch_function, has_torch_function

_DATA: Any = torch._C.TensorBase.data
_SET_DATA = _DATA.__set__
_KERNELS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
_DTYPES = (torch.half, torch.float, torch.double)
_SCATTERED = (
    "RNN module weights are not part of single contiguous chunk of memory. This means they need "
    "to be compacted at every call, possibly greatly increasing memory usage. To compact weights "
    "again call flatten_parameters()."
)


class Cudnn:
    """What torch has of cuDNN for recurrent layers.

    Attributes:
        num_flattenings: how often weights were moved into a buffer.
    """

    def __init__(self) -> None:
        self.num_flattenings = 0

    def patches(self) -> list[tuple[Any, str, Any]]:
        """Returns objects, and names and values of their attributes while there are GPUs."""
        cudnn = torch.backends.cudnn
        kernels = ((name, partial(_call, getattr(torch._VF, name))) for name in _KERNELS)
        return [
            (torch, "_cudnn_rnn_flatten_weight", self.flatten),
            (torch, "_use_cudnn_rnn_flatten_weight", lambda: True),
            (cudnn, "is_acceptable", _is_acceptable),
            (torch.backends.cudnn.rnn, "get_cudnn_mode", _MODES.__getitem__),
            *((torch._VF, name, kernel) for name, kernel in kernels),
            (torch._VF, "_pad_packed_sequence", partial(_pad, torch._VF._pad_packed_sequence)),
        ]

    def flatten(self, weights: list[Any], *sizes: Any) -> Tensor:
        """Moves weights into one buffer, and returns it."""
        if has_torch_function(tuple(weights)):
            return handle_torch_function(self.flatten, tuple(weights), weights, *sizes)
        devices = {weight.device for weight in weights}
        if len(devices) > 1 or next(iter(devices)).type != "cuda":
            raise RuntimeError(f"cuDNN cannot flatten weights on {sorted(map(str, devices))}")
        self.num_flattenings += 1
        offsets, size = _layout(weights)
        buffer = weights[0].new_zeros(size)
        for weight, offset in zip(weights, offsets, strict=True):
            part = buffer[offset : offset + weight.numel()].view(weight.shape)
            _SET_DATA(weight, part.copy_(weight.detach()))
        return buffer


def are_flat(weights: list[Tensor]) -> bool:
    """Whether weights lie in one buffer as cuDNN wants them."""
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    return len(storages) == 1 and [w.storage_offset() for w in weights] == _layout(weights)[0]


def _layout(weights: list[Tensor]) -> tuple[list[int], int]:
    """Returns where cuDNN wants each weight, and the size of all: matrices come first."""
    offsets, size = [0] * len(weights), 0
    for i in sorted(range(len(weights)), key=lambda i: -weights[i].dim()):
        offsets[i] = size
        size += prod(weights[i].shape)
    return offsets, size


def _is_acceptable(tensor: Tensor) -> bool:
    is_ours = tensor.device.type == "cuda" and tensor.dtype in _DTYPES
    return bool(torch.backends.cudnn.enabled and is_ours)


def _call(kernel: Any, *args: Any) -> Any:
    """Calls a kernel of recurrent layers; the weights are argument 2, of packed sequences 3."""
    position = 3 if isinstance(args[3], (list, tuple)) else 2
    weights = args[position]
    is_ours = _is_acceptable(args[0]) and not any(map(is_fake, weights))
    if not is_ours or has_torch_function(tuple(weights)):
        return kernel(*args)
    if not are_flat(weights):
        warnings.warn(_SCATTERED, stacklevel=3)
    if torch.is_grad_enabled():
        args = (*args[:position], [*_OneGradient.apply(*weights)], *args[position + 1 :])
    return kernel(*args)


def _pad(pad: Any, data: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Pads a packed sequence where it is; torch makes the result where tensors really are."""
    padded, lengths = pad(data, *args)
    return padded.to(data.device), lengths


class _OneGradient(torch.autograd.Function):
    """The weights themselves; their gradients are views of one buffer."""

    @staticmethod
    def forward(ctx, *weights):
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx, *grads):
        buffer = torch.cat([grad.reshape(-1) for grad in grads])
        parts = buffer.split([grad.numel() for grad in grads])
        return tuple(part.view(grad.shape) for part, grad in zip(parts, grads, strict=True))
