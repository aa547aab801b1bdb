"""What workers and servers send each other: tensors, gradients and optimizer states.

    tensors            many in one buffer, each at an offset of a multiple of 16
    an Update          the content of a push to one server; several of them have a mean
    optimizer states   those of pieces as messages; those of whole variables cut and joined

Nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.base.bitwise import are_equal
from mirror.errors import StrategyError, short_repr
from mirror.server.variable_placement import ALIGNMENT, VariablePiece

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Spec = tuple[Sequence[int], torch.dtype]

LARGE = 64 << 10
"""A tensor of this many bytes or more is sent as a buffer of its own, without a copy."""


def as_bytes(tensor: Tensor) -> Bytes:
    """Returns a tensor's bytes: its own memory if that is contiguous and on the host."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    array: Bytes = plain.view(-1).view(torch.uint8).numpy()
    return array


def pack(tensors: Sequence[Tensor]) -> Bytes:
    """Returns the bytes of tensors in one new buffer."""
    ends = _ends((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    packed = np.empty(ends[-1] if ends else 0, np.uint8)
    begin = 0
    for tensor, end in zip(tensors, ends, strict=True):
        size = tensor.numel() * tensor.dtype.itemsize
        packed[begin : begin + size] = as_bytes(tensor)
        begin = end
    return packed


def unpack(packed: Any, specs: Sequence[Spec]) -> list[Tensor]:
    """Returns the tensors of a buffer: views of it, or of a copy if it is read-only."""
    flat = as_tensor(packed, torch.uint8)
    tensors, begin = [], 0
    for (shape, dtype), end in zip(specs, _ends(specs), strict=True):
        size = math.prod(shape) * dtype.itemsize
        tensors.append(flat[begin : begin + size].view(dtype).view(tuple(shape)))
        begin = end
    return tensors


def as_tensor(array: Any, dtype: torch.dtype) -> Tensor:
    """Returns an array's bytes as a 1-d tensor: the same memory if it is writable and aligned."""
    data = np.frombuffer(array, np.uint8) if not isinstance(array, np.ndarray) else array
    if not (data.flags.writeable and data.flags.c_contiguous):
        data = np.array(data)
    data = data.reshape(-1).view(np.uint8)
    if data.ctypes.data % ALIGNMENT:
        data = data.copy()
    return torch.from_numpy(data).view(dtype)


def packed_size(specs: Sequence[Spec]) -> int:
    """Returns the size of the buffer of ``pack``, in bytes."""
    ends = _ends(specs)
    return ends[-1] if ends else 0


def is_plain(tensor: Tensor) -> bool:
    """Returns whether ``as_bytes`` returns a tensor's own memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj()


def parse_dtype(name: str) -> torch.dtype:
    """Returns the dtype with a name as ``name_of`` returns it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype: ``float32``."""
    return str(dtype).removeprefix("torch.")


def _ends(specs: Iterable[Spec]) -> list[int]:
    """Returns the aligned end of each tensor, where the next one begins."""
    ends, end = [], 0
    for shape, dtype in specs:
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        ends.append(end)
    return ends


Rows = tuple[Tensor, Tensor]
"""Indices of rows of a piece, possibly repeated, and a gradient for each."""


@dataclass
class Update:
    """Gradients and changes of buffers, by the index of the server's piece.

    Attributes:
        gradients: of whole pieces.
        rows: gradients of some rows of tables.
        changes: differences to add to buffers; for bool buffers, the new values.
    """

    gradients: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=dict)
    changes: dict[int, Tensor] = field(default_factory=dict)

    def message(self) -> tuple[dict[str, Any], list[Bytes]]:
        """Returns the header and the buffers for ``from_message``."""
        large = {piece: g for piece, g in self.gradients.items() if g.nbytes >= LARGE}
        small = {piece: g for piece, g in self.gradients.items() if piece not in large}
        header = {
            "gradients": list(small),
            "large": list(large),
            "rows": [[piece, len(ids)] for piece, (ids, _) in self.rows.items()],
            "changes": list(self.changes),
        }
        tensors = [*small.values(), *self.changes.values()]
        for ids, values in self.rows.values():
            tensors += [ids, values]
        return header, [pack(tensors), *map(as_bytes, large.values())]

    @classmethod
    def from_message(
        cls, header: Mapping[str, Any], buffers: Sequence[Any], pieces: Sequence[Spec]
    ) -> Update:
        """Returns the update of a message, from the shapes and dtypes of the server's pieces."""
        whole = [*header["gradients"], *header["changes"]]
        specs: list[Spec] = [pieces[piece] for piece in whole]
        for piece, count in header["rows"]:
            shape, dtype = pieces[piece]
            specs += [((count,), torch.int64), ((count, *shape[1:]), dtype)]
        tensors = iter(unpack(buffers[0], specs))
        gradients = {piece: next(tensors) for piece in header["gradients"]}
        for piece, buffer in zip(header["large"], buffers[1:], strict=True):
            shape, dtype = pieces[piece]
            gradients[piece] = as_tensor(buffer, dtype).view(tuple(shape))
        changes = {piece: next(tensors) for piece in header["changes"]}
        rows = {piece: (next(tensors), next(tensors)) for piece, _ in header["rows"]}
        return cls(gradients, rows, changes)


def mean_of_updates(updates: Sequence[Update], weights: Sequence[float]) -> Update:
    """Returns the weighted mean of updates; an update without a gradient counts as zeros.

    Integers have no exact mean, so the first update's changes of integer buffers are used.
    """
    total = float(sum(weights))
    shares = [weight / total for weight in weights]
    result = Update()
    for piece in _keys(update.gradients for update in updates):
        result.gradients[piece] = _weighted_sum([u.gradients.get(piece) for u in updates], shares)
    for piece in _keys(update.rows for update in updates):
        rows = [
            (u.rows[piece], s) for u, s in zip(updates, shares, strict=True) if piece in u.rows
        ]
        ids = torch.cat([ids for (ids, _), _ in rows])
        result.rows[piece] = ids, torch.cat([values * share for (_, values), share in rows])
    for piece in _keys(update.changes for update in updates):
        changes = [update.changes.get(piece) for update in updates]
        first = next(change for change in changes if change is not None)
        has_mean = first.is_floating_point() or first.is_complex()
        result.changes[piece] = _weighted_sum(changes, shares) if has_mean else first
    return result


def rows_of(gradient: Tensor, piece: VariablePiece) -> tuple[Tensor, Tensor]:
    """Returns the rows of a sparse gradient that are in a piece, with indices in the piece."""
    whole = gradient.detach().coalesce()
    if whole.sparse_dim() != 1:
        raise StrategyError(
            "parameter servers take sparse gradients with one sparse dimension, the rows; got "
            f"{whole.sparse_dim()} sparse dimensions of {dtype_name(whole.dtype)}"
        )
    rows = whole.indices()[0]
    mine = (rows >= piece.begin) & (rows < piece.end)
    return rows[mine] - piece.begin, whole.values()[mine]


def _keys(dicts: Iterable[Mapping[int, Any]]) -> list[int]:
    return sorted({key for each in dicts for key in each})


def _weighted_sum(tensors: Sequence[Tensor | None], shares: Sequence[float]) -> Tensor:
    (first, share), *rest = [
        (tensor, share)
        for tensor, share in zip(tensors, shares, strict=True)
        if tensor is not None
    ]
    total = first * share
    for tensor, share in rest:
        total.add_(tensor, alpha=share)
    return total


State = dict[str, Any]


def encode_states(states: Mapping[int, State]) -> tuple[list[Any], list[Bytes]]:
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
                entries.append([piece, name, [list(value.shape), dtype_name(value.dtype)]])
                tensors.append(value)
            elif value is None or isinstance(value, (bool, int, float, str)):
                entries.append([piece, name, None, value])
            else:
                raise StrategyError(
                    f"an optimizer's state {name!r} is {short_repr(value)}; parameter servers "
                    "keep tensors, numbers, strings and None"
                )
    return entries, [pack(tensors)]


def decode_states(entries: Sequence[Any], buffers: Sequence[Any]) -> dict[int, State]:
    """Returns the states of a message, as copies."""
    specs = [(entry[2][0], parse_dtype(entry[2][1])) for entry in entries if entry[2] is not None]
    tensors = iter(unpack(buffers[0], specs))
    states: dict[int, State] = {}
    for piece, name, spec, *value in entries:
        entry = value[0] if spec is None else next(tensors).clone()
        states.setdefault(piece, {})[name] = entry
    return states


def cut_state(
    state: State, shape: tuple[int, ...], rows: Sequence[tuple[int, int]]
) -> list[State]:
    """Returns the states of a variable's pieces.

    A tensor of the variable's shape is cut into rows; other values go to every piece.
    """
    if len(rows) == 1:
        return [state]
    return [
        {name: _rows_of(value, shape, begin, end) for name, value in state.items()}
        for begin, end in rows
    ]


def join_states(name: str, states: Sequence[State], shapes: Sequence[tuple[int, ...]]) -> State:
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
        elif all(are_equal(first, value) for value in values):
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
