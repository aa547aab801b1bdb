"""States of optimizers: of pieces, as messages; of whole variables, cut and joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.errors import StrategyError, short_repr
from mirror.server.tensor_bytes import Bytes, dtype_named, name_of, pack, unpack

State = dict[str, Any]


def message_of(states: Mapping[int, State]) -> tuple[list[Any], list[Bytes]]:
    """Returns the states of pieces as what JSON can say and a buffer.

    Raises:
        StrategyError: a state is neither of tensors nor of plain values.
    """
    said: list[Any] = []
    tensors = []
    for piece, state in states.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                said.append([piece, name, [list(value.shape), name_of(value.dtype)]])
                tensors.append(value)
            elif value is None or isinstance(value, (bool, int, float, str)):
                said.append([piece, name, None, value])
            else:
                raise StrategyError(
                    f"an optimizer's state {name!r} is {short_repr(value)}; parameter "
                    "servers keep "
                    "tensors, numbers, strings and None"
                )
    return said, [pack(tensors)]


def from_message(said: Sequence[Any], buffers: Sequence[Any]) -> dict[int, State]:
    """Returns the states of a message, in memory of their own."""
    specs = [(entry[2][0], dtype_named(entry[2][1])) for entry in said if entry[2] is not None]
    tensors = iter(unpack(buffers[0], specs))
    states: dict[int, State] = {}
    for piece, name, spec, *value in said:
        found = value[0] if spec is None else next(tensors).clone()
        states.setdefault(piece, {})[name] = found
    return states


def cut(state: State, shape: tuple[int, ...], rows: Sequence[tuple[int, int]]) -> list[State]:
    """Returns the states of a variable's pieces: rows of what has its shape, the rest to each."""
    if len(rows) == 1:
        return [state]
    return [
        {name: _rows_of(value, shape, begin, end) for name, value in state.items()}
        for begin, end in rows
    ]


def join(name: str, states: Sequence[State], shapes: Sequence[tuple[int, ...]]) -> State:
    """Returns a variable's state from those of its pieces.

    Raises:
        StrategyError: something neither has the pieces' shapes nor is the same for all.
    """
    if len(states) == 1:
        return states[0]
    joined: State = {}
    for key, first in states[0].items():
        values = [state.get(key) for state in states]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) == len(values) and [tuple(t.shape) for t in tensors] == list(shapes):
            joined[key] = torch.cat(tensors)
        elif all(_same(first, value) for value in values):
            joined[key] = first
        else:
            raise StrategyError(
                f"the optimizer's state {key!r} of {name} differs between its pieces, and has not "
                "their shape, so that no whole variable has it; leave out partitioner="
            )
    return joined


def _rows_of(value: Any, shape: tuple[int, ...], begin: int, end: int) -> Any:
    if isinstance(value, Tensor) and tuple(value.shape) == shape:
        return value[begin:end]
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
