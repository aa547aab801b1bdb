"""Recurrent networks in a trace: a call for each layer, with the dropout between them.

The trace of a step sees ``torch.lstm``, ``torch.gru`` and the like as torch's decomposition in
Python, which leaves out the dropout between layers. The LSTMs of the CPU call their kernel
instead. On GPUs no trace calls cuDNN, so the weights need not lie in one buffer. The trace of a
module keeps the kernels of an uncompiled call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from mirror.base.torch_private import wrapping
from mirror.compiler.fused_lstm import call_lstm, can_fuse
from mirror.compiler.torch_internals import has_mkldnn

RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_NAMES = (
    *("input", "hx", "params", "has_biases", "num_layers"),
    *("dropout", "train", "bidirectional", "batch_first"),
)


def keeping_weights(is_traced: Callable[[], bool]) -> AbstractContextManager[None]:
    """Within the block, a traced step's ``flatten_parameters`` does nothing.

    It compares addresses, which placeholders lack, and moves the weights for cuDNN. A layer calls
    it by itself where its weights are other tensors than before, as placeholders are.

    Args:
        is_traced: whether this thread traces the step.
    """

    def wrap(flatten: Callable[..., None]) -> Callable[..., None]:
        def flatten_parameters(layer: nn.RNNBase) -> None:
            if not is_traced():
                flatten(layer)

        return flatten_parameters

    return wrapping(nn.RNNBase, "flatten_parameters", wrap)


def call_own_kernels(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns the result of ``func`` by the kernels of an untraced call; ``None`` if it cannot.

    On the CPU that is the fused LSTM, or torch's own composition, which the trace sees.
    """
    options = _options_of(args, kwargs)
    values, states, params = options["input"], options["hx"], options["params"]
    if values.device.type != "cpu" or not isinstance(options.get("has_biases"), bool):
        return None
    is_pair = isinstance(states, (tuple, list))
    if not is_pair or values.dtype == torch.float64 or not has_mkldnn():
        return func(*args, **kwargs)
    if not can_fuse(values, states, params, options["has_biases"]):
        return None  # another kernel of oneDNN
    return call_layers(func, args, kwargs)


def call_layers(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns the result of ``func``, one of ``RECURRENT``: the output, and the last states."""
    options = _options_of(args, kwargs)
    if not isinstance(options.get("has_biases"), bool):
        return func(*args, **kwargs)  # of a packed sequence, which cannot be traced
    probability, num_layers = options["dropout"], options["num_layers"]
    is_pair = isinstance(options["hx"], (tuple, list))  # an LSTM's
    states = options["hx"] if is_pair else [options["hx"]]
    has_dropout = probability > 0 and options["train"]
    is_fused = is_pair and can_fuse(
        options["input"], states, options["params"], options["has_biases"]
    )
    if not is_fused and (num_layers == 1 or not has_dropout):
        return func(*args, **kwargs)
    rows = 1 + options["bidirectional"]
    weights = len(options["params"]) // num_layers
    values, last = options["input"], []
    if is_fused and options["batch_first"]:
        values = values.transpose(0, 1)
    for layer in range(num_layers):
        if layer > 0 and has_dropout:
            values = torch.dropout(values, probability, train=True)
        first = [state[layer * rows : (layer + 1) * rows] for state in states]
        params = options["params"][layer * weights : (layer + 1) * weights]
        call = _call_fused if is_fused else _call_layer
        values, *after = call(func, {**options, "input": values, "hx": first, "params": params})
        last.append(after)
    if is_fused and options["batch_first"]:
        values = values.transpose(0, 1)
    return values, *map(torch.cat, zip(*last, strict=True))


def _options_of(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_NAMES, args, strict=False)), **kwargs}


def _call_layer(func: Any, options: dict[str, Any]) -> tuple[Tensor, ...]:
    first = options["hx"]
    options |= {"num_layers": 1, "dropout": 0.0, "hx": first if len(first) > 1 else first[0]}
    found: tuple[Tensor, ...] = func(*(options[name] for name in _NAMES))
    return found


def _call_fused(func: Any, options: dict[str, Any]) -> tuple[Tensor, ...]:
    hx, cx = options["hx"]
    return call_lstm(
        options["input"],
        hx,
        cx,
        options["params"],
        has_biases=options["has_biases"],
        bidirectional=options["bidirectional"],
    )
