"""The content of a push to one server, as messages, and the mean of several pushes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mirror.errors import StrategyError
from mirror.server.tensor_bytes import (
    LARGE,
    Bytes,
    Spec,
    as_bytes,
    as_tensor,
    name_of,
    pack,
    unpack,
)
from mirror.server.variable_placement import VariablePiece

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


def mean(updates: Sequence[Update], weights: Sequence[float]) -> Update:
    """Returns the weighted mean of updates; an update without a gradient counts as zeros.

    Integers have no exact mean, so the first update's changes of integer buffers are used.
    """
    total = float(sum(weights))
    shares = [weight / total for weight in weights]
    result = Update()
    for piece in _keys(update.gradients for update in updates):
        result.gradients[piece] = _weighted([u.gradients.get(piece) for u in updates], shares)
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
        result.changes[piece] = _weighted(changes, shares) if has_mean else first
    return result


def same_values(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors are equal; NaN equals NaN here."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def rows_of(gradient: Tensor, piece: VariablePiece) -> tuple[Tensor, Tensor]:
    """Returns the rows of a sparse gradient that are in a piece, with indices in the piece."""
    whole = gradient.detach().coalesce()
    if whole.sparse_dim() != 1:
        raise StrategyError(
            "parameter servers take sparse gradients with one sparse dimension, the rows; got "
            f"{whole.sparse_dim()} sparse dimensions of {name_of(whole.dtype)}"
        )
    rows = whole.indices()[0]
    mine = (rows >= piece.begin) & (rows < piece.end)
    return rows[mine] - piece.begin, whole.values()[mine]


def _keys(dicts: Iterable[Mapping[int, Any]]) -> list[int]:
    return sorted({key for each in dicts for key in each})


def _weighted(tensors: Sequence[Tensor | None], shares: Sequence[float]) -> Tensor:
    (first, share), *rest = [
        (tensor, share)
        for tensor, share in zip(tensors, shares, strict=True)
        if tensor is not None
    ]
    total = first * share
    for tensor, share in rest:
        total.add_(tensor, alpha=share)
    return total
