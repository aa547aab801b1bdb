"""Updates: what one push carries to one server, and the mean of several."""

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
"""Indices of rows of a piece, maybe several times, and what belongs to each."""


@dataclass
class Update:
    """Gradients and changes of buffers, by the index of the server's piece.

    Attributes:
        gradients: of whole pieces.
        rows: of tables, whose other rows have none.
        changes: by how much buffers have changed; of bool ones, what they are now.
    """

    gradients: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=dict)
    changes: dict[int, Tensor] = field(default_factory=dict)

    def message(self) -> tuple[dict[str, Any], list[Bytes]]:
        """Returns the header's part and the buffers that ``from_message`` takes."""
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
        """Returns the update of a message; ``pieces`` are shapes and dtypes of the server's."""
        whole = [*header["gradients"], *header["changes"]]
        specs: list[Spec] = [pieces[piece] for piece in whole]
        for piece, count in header["rows"]:
            shape, dtype = pieces[piece]
            specs += [((count,), torch.int64), ((count, *shape[1:]), dtype)]
        found = iter(unpack(buffers[0], specs))
        gradients = {piece: next(found) for piece in header["gradients"]}
        for piece, buffer in zip(header["large"], buffers[1:], strict=True):
            gradients[piece] = flat(buffer, pieces[piece])
        changes = {piece: next(found) for piece in header["changes"]}
        rows = {piece: (next(found), next(found)) for piece, _ in header["rows"]}
        return cls(gradients, rows, changes)


def mean(updates: Sequence[Update], weights: Sequence[float]) -> Update:
    """Returns the mean of updates, weighted; one that lacks a gradient counts as zeros.

    Of changes of integers, whose mean is none, the first one is taken.
    """
    total = float(sum(weights))
    shares = [weight / total for weight in weights]
    result = Update()
    for piece in _keys(update.gradients for update in updates):
        result.gradients[piece] = _weighted([u.gradients.get(piece) for u in updates], shares)
    for piece in _keys(update.rows for update in updates):
        parts = [
            (u.rows[piece], s) for u, s in zip(updates, shares, strict=True) if piece in u.rows
        ]
        ids = torch.cat([ids for (ids, _), _ in parts])
        result.rows[piece] = ids, torch.cat([values * share for (_, values), share in parts])
    for piece in _keys(update.changes for update in updates):
        found = [update.changes.get(piece) for update in updates]
        first = next(change for change in found if change is not None)
        is_exact = first.is_floating_point() or first.is_complex()
        result.changes[piece] = _weighted(found, shares) if is_exact else first
    return result


def flat(array: Any, spec: Spec) -> Tensor:
    """Returns one tensor that a buffer has alone."""
    shape, dtype = spec
    return as_tensor(array, dtype).view(tuple(shape))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal; NaN is NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def rows_of(gradient: Tensor, piece: VariablePiece) -> tuple[Tensor, Tensor]:
    """Returns a piece's rows of a sparse gradient, by the piece's own indices."""
    whole = gradient.detach().coalesce()
    if whole.sparse_dim() != 1:
        raise StrategyError(
            "a sparse gradient that parameter servers take has one sparse dimension, its rows; "
            f"got {whole.sparse_dim()} of {name_of(whole.dtype)}"
        )
    rows = whole.indices()[0]
    mine = (rows >= piece.begin) & (rows < piece.end)
    return rows[mine] - piece.begin, whole.values()[mine]


def _keys(dicts: Iterable[Mapping[int, Any]]) -> list[int]:
    return sorted({key for each in dicts for key in each})


def _weighted(parts: Sequence[Tensor | None], shares: Sequence[float]) -> Tensor:
    there = [(p, share) for p, share in zip(parts, shares, strict=True) if p is not None]
    total = there[0][0] * there[0][1]
    for part, share in there[1:]:
        total.add_(part, alpha=share)
    return total
