"""Optimizer states: those of pieces as messages, those of whole variables cut and joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.errors import StrategyError, short_repr
from mirror.server.tensor_bytes import Bytes, dtype_named, name_of, pack, unpack

State = dict[str, Any]


def message_of(states: Mapping[int, State]) -> tuple[list[Any], list[Bytes]]:
    """Returns the states of pieces as a list of JSON entries and one buffer.

    An entry is ``[piece, name, [shape, dtype]]`` for a tensor, ``[piece, name, None, value]``
    for a plain value.

    Raises:
        StrategyError: a state has values of other types.
    """
    entries: list[Any] = []
    tensors = []
    for piece, state in states.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                entries.append([piece, name, [list(value.shape), name_of(value.dtype)]])
                tensors.append(value)
            elif value is None or isinstance(value, (bool, int, float, str)):
                entries.append([piece, name, None, value])
            else:
                raise StrategyError(
                    f"an optimizer's state {name!r} is {short_repr(value)}; parameter servers "
                    "keep tensors, numbers, strings and None"
                )
    return entries, [pack(tensors)]


def from_message(entries: Sequence[Any], buffers: Sequence[Any]) -> dict[int, State]:
    """Returns the states of a message, as copies."""
    specs = [(entry[2][0], dtype_named(entry[2][1])) for entry in entries if entry[2] is not None]
    tensors = iter(unpack(buffers[0], specs))
    states: dict[int, State] = {}
    for piece, name, spec, *value in entries:
        entry = value[0] if spec is None else next(tensors).clone()
        states.setdefault(piece, {})[name] = entry
    return states


def cut(state: State, shape: tuple[int, ...], rows: Sequence[tuple[int, int]]) -> list[State]:
    """Returns the states of a variable's pieces.

    A tensor of the variable's shape is cut into rows; other values go to every piece.
    """
    if len(rows) == 1:
        return [state]
    return [
        {name: _rows_of(value, shape, begin, end) for name, value in state.items()}
        for begin, end in rows
    ]


def join(name: str, states: Sequence[State], shapes: Sequence[tuple[int, ...]]) -> State:
    """Returns a variable's state from the states of its pieces.

    Raises:
        StrategyError: a value differs between the pieces and does not have their shapes.
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
                f"the optimizer's state {key!r} of {name} differs between its pieces and does not "
                "have their shape, so the pieces cannot be joined; leave out partitioner="
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
