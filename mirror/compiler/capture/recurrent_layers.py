"""Recurrent networks of several layers in a trace: a call for each, with the dropout between them.

A trace sees ``torch.lstm``, ``torch.gru`` and the like as torch's decomposition in Python, which
leaves out the dropout between layers.
"""

from __future__ import annotations

from typing import Any

import torch

RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_NAMES = (
    *("input", "hx", "params", "has_biases", "num_layers"),
    *("dropout", "train", "bidirectional", "batch_first"),
)


def call_layers(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns the result of ``func``, one of ``RECURRENT``: the output, and the last states."""
    options = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    if not isinstance(options.get("has_biases"), bool):
        return func(*args, **kwargs)  # of a packed sequence, which cannot be traced
    probability, num_layers = options["dropout"], options["num_layers"]
    if num_layers == 1 or probability == 0 or not options["train"]:
        return func(*args, **kwargs)
    is_pair = isinstance(options["hx"], (tuple, list))  # an LSTM's
    states = options["hx"] if is_pair else [options["hx"]]
    rows = 1 + options["bidirectional"]
    weights = len(options["params"]) // num_layers
    options |= {"num_layers": 1, "dropout": 0.0}
    values, params, last = options["input"], options["params"], []
    for layer in range(num_layers):
        if layer > 0:
            values = torch.dropout(values, probability, train=True)
        first = [state[layer * rows : (layer + 1) * rows] for state in states]
        options |= {"input": values, "hx": first if is_pair else first[0]}
        options["params"] = params[layer * weights : (layer + 1) * weights]
        values, *after = func(*(options[name] for name in _NAMES))
        last.append(after)
    return values, *map(torch.cat, zip(*last, strict=True))
