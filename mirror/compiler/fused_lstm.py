"""The fused LSTM of the CPU, as an operation of a trace.

Uncompiled, ``torch.lstm`` calls oneDNN's kernel for float32 on the CPU, once per layer and
direction. A trace would see torch's decomposition in Python, with the matrix products of every
time step; that takes 1.7 times as long. So a traced LSTM becomes two operations that call the
kernel: ``mirror.lstm`` and ``mirror.lstm_backward``.

The kernel's workspace, which its backward pass needs, stays outside of the graph, because its size
is known only after the forward pass. The graph passes its number instead. Workspaces of a step
that has failed are never used, so only the newest 64 are kept. If the backward pass does not find
its workspace, it runs the forward kernel again.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mirror.base.mutex import Mutex

_LSTM = 2  # the kind of layer, in ideep's numbers
_MAX_WORKSPACES = 64

_workspaces: dict[int, Tensor] = {}
_numbers = itertools.count(1)
_mutex = Mutex()


def define_lstm(library: torch.library.Library) -> None:
    """Defines the operations."""
    layer = "Tensor values, Tensor[] weights, Tensor hx, Tensor cx, bool reverse"
    library.define(f"lstm({layer}, bool train) -> (Tensor, Tensor, Tensor, Tensor)")
    library.impl("lstm", _lstm, "CompositeExplicitAutograd")
    library.impl("lstm", _meta_lstm, "Meta")
    library.define(
        f"lstm_backward({layer}, Tensor output, Tensor hy, Tensor cy, Tensor number, "
        "Tensor[] grads) -> Tensor[]"
    )
    library.impl("lstm_backward", _lstm_backward, "CompositeExplicitAutograd")
    library.impl("lstm_backward", _meta_lstm_backward, "Meta")


def can_fuse(values: Tensor, states: Any, params: Any, has_biases: bool) -> bool:
    """Whether torch would call the kernel for such values outside of a trace."""
    tensors = [values, *states, *params]
    return (
        values.dim() == 3
        and not torch.is_autocast_enabled("cpu")  # autocast chooses another dtype
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
        and states[0].size(2) == states[1].size(2)  # no projections
        and len(params) % (4 if has_biases else 2) == 0
        and torch.backends.mkldnn.is_available()
    )


def call_lstm(
    values: Tensor,
    hx: Tensor,
    cx: Tensor,
    params: list[Tensor],
    *,
    has_biases: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output of one layer, and its last states.

    Args:
        values: of shape (steps, examples, features).
        hx, cx: the first states, of shape (directions, examples, size).
        params: per direction two weights, then two biases if ``has_biases``.
    """
    count, outputs = 4 if has_biases else 2, []
    for direction in range(2 if bidirectional else 1):
        weights = list(params[direction * count : (direction + 1) * count])
        if not has_biases:
            weights += [torch.zeros_like(weight[:, 0]) for weight in weights]
        tensors = values, hx[direction], cx[direction], *weights
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            outputs.append(_Lstm.apply(direction == 1, *tensors))  # type: ignore[no-untyped-call]
        else:
            values, h, c, *weights = tensors
            outputs.append(_op("lstm")(values, weights, h, c, direction == 1, False)[:3])
    if len(outputs) == 1:
        output, hy, cy = outputs[0]
        return output, hy.unsqueeze(0), cy.unsqueeze(0)
    columns = list(zip(*outputs, strict=True))
    return torch.cat(columns[0], 2), torch.stack(columns[1]), torch.stack(columns[2])


def _op(name: str) -> Any:
    return getattr(torch.ops.mirror, name).default


class _Lstm(torch.autograd.Function):
    """The differentiable operation."""

    @staticmethod
    def forward(ctx: Any, reverse: bool, values: Tensor, hx: Tensor, cx: Tensor, *weights: Tensor):  # type: ignore[no-untyped-def]
        output, hy, cy, number = _op("lstm")(values, list(weights), hx, cx, reverse, True)
        ctx.reverse = reverse
        ctx.save_for_backward(values, hx, cx, *weights, output, hy, cy, number)
        return output, hy, cy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):  # type: ignore[no-untyped-def]
        values, hx, cx, *weights, output, hy, cy, number = ctx.saved_tensors
        grad_input, grad_hx, grad_cx, *of_weights = _op("lstm_backward")(
            *(values, weights, hx, cx, ctx.reverse, output, hy, cy, number), list(grads)
        )
        return None, grad_input, grad_hx, grad_cx, *of_weights


def _forward(
    values: Tensor, weights: list[Tensor], hx: Tensor, cx: Tensor, reverse: bool, train: bool
) -> Any:
    """Calls the kernel. It returns a workspace only in grad mode."""
    with torch.set_grad_enabled(train):
        return torch.ops.aten.mkldnn_rnn_layer.default(
            *(values.contiguous(), *weights, hx.contiguous(), cx.contiguous(), reverse),
            *([], _LSTM, hx.size(-1), 1, True, False, False, train),
        )


def _lstm(
    values: Tensor, weights: list[Tensor], hx: Tensor, cx: Tensor, reverse: bool, train: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, hy, cy, workspace = _forward(values, weights, hx, cx, reverse, train)
    number = 0
    if train:
        number = next(_numbers)
        _mutex.call(_keep_workspace, number, workspace)
    return output, hy.view_as(hx), cy.view_as(cx), hx.new_full((), number, dtype=torch.int64)


def _keep_workspace(number: int, workspace: Tensor) -> None:
    _workspaces[number] = workspace
    while len(_workspaces) > _MAX_WORKSPACES:
        _workspaces.pop(next(iter(_workspaces)), None)


def _lstm_backward(
    values: Tensor,
    weights: list[Tensor],
    hx: Tensor,
    cx: Tensor,
    reverse: bool,
    output: Tensor,
    hy: Tensor,
    cy: Tensor,
    number: Tensor,
    grads: list[Tensor],
) -> list[Tensor]:
    workspace = _workspaces.pop(int(number), None)
    if workspace is None:
        workspace = _forward(values, weights, hx, cx, reverse, True)[3]
    found = torch.ops.aten.mkldnn_rnn_layer_backward.default(
        *(values.contiguous(), *weights, hx.contiguous(), cx.contiguous(), output, hy, cy),
        *(grad.contiguous() for grad in grads),
        *(reverse, _LSTM, hx.size(-1), 1, True, True, False, [], False, workspace),
    )
    grad_input, *of_weights, grad_hx, grad_cx = found
    return [grad_input, grad_hx.view_as(hx), grad_cx.view_as(cx), *of_weights]


def _meta_lstm(
    values: Tensor, weights: list[Tensor], hx: Tensor, cx: Tensor, reverse: bool, train: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps, examples, _ = values.shape
    output = values.new_empty(steps, examples, hx.size(-1))
    number = values.new_empty((), dtype=torch.int64)
    return output, hx.new_empty(hx.shape), cx.new_empty(cx.shape), number


def _meta_lstm_backward(
    values: Tensor, weights: list[Tensor], hx: Tensor, cx: Tensor, *others: Any
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (values, hx, cx, *weights)]
