"""Layers of torch whose examples are not the first dimension, inside a split call.

    a layer                                  its examples are
    RNN, LSTM, GRU: states in and out        the second dimension, also with batch_first
    these, attention, Transformer: inputs    the second dimension, the first with batch_first

A split call splits the first dimension. So a state that the caller has made for the whole batch,
``torch.zeros(num_layers, len(x), size)``, comes to a replica's layer whole, and the layer would
refuse it: it is given the replica's examples of it. A state that goes out is never taken for
a batch, however many layers there are. Inputs that have been split along their steps, where each
replica would compute a part of every sequence, get a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from mirror.execution.replicas import Replica
from mirror.threads.user_frames import warn_user

LAYERS = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_RECURRENT = (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)
_STATE = "_mirror_is_state"


def is_sequence_first(module: nn.Module) -> bool:
    """Whether a module's batch is not the first dimension: it has not been told so."""
    inner = getattr(module, "self_attn", module)
    return isinstance(module, LAYERS) and not getattr(inner, "batch_first", False)


def is_state(tensor: Tensor) -> bool:
    """Whether a tensor is what a recurrent layer returned as a state in a split call."""
    return tensor.dim() == 3 and _STATE in tensor.__dict__


def call_with_sequences(
    replica: Replica, module: Any, call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Calls a layer on a replica, with its examples of states, and marks those it returns."""
    weights = replica.run.all_weights() if replica.run.is_split else None
    if weights is None or weights[replica.replica_id] == sum(weights):
        return call(*args, **kwargs)
    size, start = int(weights[replica.replica_id]), int(sum(weights[: replica.replica_id]))
    num_examples = int(sum(weights))
    inputs = args[0] if args else next(iter(kwargs.values()), None)
    batch = _batch_of(module, inputs)
    if start == 0 and is_sequence_first(module):
        _warn_of_steps(module, inputs, size, num_examples)
    if type(module).forward not in _RECURRENT:
        return call(*args, **kwargs)
    num_layers = module.num_layers * (2 if module.bidirectional else 1)

    def own(state: Any) -> Any:
        if type(state) in (tuple, list):
            return type(state)(map(own, state))
        # Anything else than the whole batch's states is the layer's to judge.
        is_whole = isinstance(state, Tensor) and state.shape[:2] == (num_layers, num_examples)
        if is_whole and state.dim() == 3 and batch == size:
            return state.narrow(1, start, size).contiguous()
        return state

    if len(args) > 1:
        args = (args[0], own(args[1]), *args[2:])
    elif "hx" in kwargs:
        kwargs = {**kwargs, "hx": own(kwargs["hx"])}
    output, states = call(*args, **kwargs)
    for state in states if isinstance(states, tuple) else (states,):
        setattr(state, _STATE, True)
    return output, states


def _batch_of(module: nn.Module, inputs: Any) -> int | None:
    """Returns the number of examples that a layer sees; ``None`` without a batch."""
    if isinstance(inputs, PackedSequence):
        return int(inputs.batch_sizes[0])
    if not isinstance(inputs, Tensor) or inputs.dim() != 3:
        return None
    return inputs.shape[1 if is_sequence_first(module) else 0]


def _warn_of_steps(module: nn.Module, inputs: Any, size: int, num_examples: int) -> None:
    """Warns where the steps of sequences, not the examples, are as many as those of the part."""
    if not isinstance(inputs, Tensor) or inputs.dim() != 3:
        return
    if inputs.shape[0] == size and inputs.shape[1] != size:
        kind = type(module).__name__
        warn_user(
            f"a split call has split the first dimension, {num_examples}, and {kind} without "
            f"batch_first takes it for the steps: an input of shape {tuple(inputs.shape)} has "
            f"{size} of them, and each replica computes a part of every sequence, which is not "
            f"what one device gives. Make {kind} with batch_first=True and give the model the "
            "examples first, or call the model inside strategy.run with each replica's examples"
        )
