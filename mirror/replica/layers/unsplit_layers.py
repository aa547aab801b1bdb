"""Layers of torch that need more than a split of the first dimension.

    a layer                                  its examples are
    RNN, LSTM, GRU: states in and out        the second dimension, also with batch_first
    these, attention, Transformer: inputs    the second dimension, the first with batch_first

A split call splits the first dimension. A state for the whole batch,
``torch.zeros(num_layers, len(x), size)``, therefore reaches every replica's layer whole, and torch
would reject its shape. So the layer gets only the part for the replica's examples. A state that a
layer returns is never taken for a batch, even if it has as many layers as examples. Inputs that
are split along their steps cause a warning, since each replica then computes a part of
every sequence.

Embeddings with ``max_norm`` renormalize, in forward, the rows that they look up. So every replica
renormalizes the rows of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from mirror.base.dynamo import disable_dynamo
from mirror.execution.run import Replica
from mirror.replica.collectives.collectives import all_gather
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
    """Returns whether a module's batch is not the first dimension, as ``batch_first`` states."""
    inner = getattr(module, "self_attn", module)
    return isinstance(module, LAYERS) and not getattr(inner, "batch_first", False)


def is_state(tensor: Tensor) -> bool:
    """Returns whether a recurrent layer returned a tensor as a state in a split call."""
    return tensor.dim() == 3 and _STATE in tensor.__dict__


def call_with_sequences(
    replica: Replica, module: Any, call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Calls a layer with the replica's examples of its states, and marks the states it returns."""
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

    def narrow(state: Any) -> Any:
        if type(state) in (tuple, list):
            return type(state)(map(narrow, state))
        # The layer itself rejects states of any other shape.
        is_whole = isinstance(state, Tensor) and state.shape[:2] == (num_layers, num_examples)
        if is_whole and state.dim() == 3 and batch == size:
            return state.narrow(1, start, size).contiguous()
        return state

    if len(args) > 1:
        args = (args[0], narrow(args[1]), *args[2:])
    elif "hx" in kwargs:
        kwargs = {**kwargs, "hx": narrow(kwargs["hx"])}
    output, states = call(*args, **kwargs)
    for state in states if isinstance(states, tuple) else (states,):
        setattr(state, _STATE, True)
    return output, states


def _batch_of(module: nn.Module, inputs: Any) -> int | None:
    """Returns the number of examples in a layer's inputs; ``None`` without a batch."""
    if isinstance(inputs, PackedSequence):
        return int(inputs.batch_sizes[0])
    if not isinstance(inputs, Tensor) or inputs.dim() != 3:
        return None
    return inputs.shape[1 if is_sequence_first(module) else 0]


def _warn_of_steps(module: nn.Module, inputs: Any, size: int, num_examples: int) -> None:
    """Warns if the inputs have been split along their steps instead of their examples."""
    if not isinstance(inputs, Tensor) or inputs.dim() != 3:
        return
    if inputs.shape[0] == size and inputs.shape[1] != size:
        kind = type(module).__name__
        warn_user(
            f"a split call has split the first dimension, {num_examples}, and {kind} without "
            f"batch_first takes it for the steps: an input of shape {tuple(inputs.shape)} has "
            f"{size} of them, and each replica computes a part of every sequence, so the result "
            f"differs from one device's. Create {kind} with batch_first=True and pass the "
            "examples first, or call the model inside strategy.run with each replica's examples"
        )


MOST_ROUNDS = 8


def renormalizes(module: nn.Module) -> bool:
    """Returns whether calling the module renormalizes rows of its weight."""
    is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return is_embedding and module.max_norm is not None


@disable_dynamo
def renormalize_everywhere(module: Any, replica: Replica, indices: Tensor) -> None:
    """Renormalizes, on every replica, the rows that any replica is about to look up.

    This is a collective: all replicas must call the module.

    Raises:
        CompileError: a step is being traced, but the number of rows depends on values.
    """
    if replica.tracing is not None:
        replica.tracing.refuse(
            f"{type(module).__name__}(max_norm={module.max_norm}), which writes the rows that it "
            "looks up,",
            "leave max_norm out and bound the rows of the weight after the step",
        )
    rows = torch.unique(all_gather(replica, indices.detach().reshape(-1)))
    weight = module.weight.detach()
    with torch.no_grad():
        # Rounding may leave a norm above the bound, and the module's own call would then shrink
        # it on this replica only: repeat until nothing changes.
        for _ in range(MOST_ROUNDS):
            before = weight[rows]
            torch.embedding_renorm_(weight, rows, module.max_norm, module.norm_type)
            if torch.equal(weight[rows], before):
                break


def warn_of_frequencies(module: nn.Module) -> None:
    """Warns of an embedding that counts how often the batch has a row."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq:
        warn_user(
            f"{type(module).__name__}(scale_grad_by_freq=True) divides the gradient of a row by "
            "how often the replica's part of the batch has it, and one device by how often the "
            "batch has it; leave scale_grad_by_freq out, and scale the gradient after backward"
        )
