"""The placement of variables: which server holds which piece. It depends only on shapes.

::

    place([VariableSpec("weight", (5, 2)), VariableSpec("bias", (5,))], 2,
          partitioner=FixedShards(2))

        weight, rows 0 to 3    server 0
        weight, rows 3 to 5    server 1
        bias, rows 0 to 3      server 0
        bias, rows 3 to 5      server 1

A server's pieces are in one flat buffer of bytes, each at a multiple of 16, in the order of the
variables. Tables that are pulled by rows come after all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from mirror.errors import short_repr
from mirror.server.partitioners import Partitioner, num_pieces

ALIGNMENT = 16

PlacementFunction = Callable[[str, "tuple[int, ...]", torch.dtype, int], int]
"""Takes name, shape, dtype and the number of servers; returns a server's index."""

PLACEMENTS = ("round_robin", "largest_first")


@dataclass(frozen=True)
class VariableSpec:
    """A parameter or buffer, as placement sees it.

    Attributes:
        is_whole: whether it is a buffer, which no partitioner cuts.
        by_rows: whether it is a table, which workers pull and push by rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_whole: bool = False
    by_rows: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class VariablePiece:
    """Some rows of a variable, on a server.

    Attributes:
        variable: the index of the variable.
        begin, end: its rows; 0 and 1 for a scalar.
        shape: of the piece.
        server: the index of the server that holds it.
        offset: of its first byte in the server's buffer.
    """

    variable: int
    begin: int
    end: int
    shape: tuple[int, ...]
    server: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """The pieces of all variables and their servers.

    Attributes:
        variables: all variables.
        pieces: of all servers, ordered by variable and row.
        sizes: of the servers' buffers, in bytes.
        dense_sizes: of the buffers' first parts, without tables, in bytes.
    """

    variables: tuple[VariableSpec, ...]
    pieces: tuple[VariablePiece, ...]
    sizes: tuple[int, ...]
    dense_sizes: tuple[int, ...]

    def of_server(self, server: int) -> list[VariablePiece]:
        """Returns a server's pieces, by variable and row; messages refer to them by this index."""
        return [piece for piece in self.pieces if piece.server == server]

    def of_variable(self, variable: int) -> list[VariablePiece]:
        """Returns a variable's pieces, by row."""
        return [piece for piece in self.pieces if piece.variable == variable]


def check_placement(placement: object) -> None:
    """Raises ValueError if the argument is neither a placement's name nor a function."""
    if not callable(placement) and placement not in PLACEMENTS:
        raise ValueError(
            f"placement must be one of {', '.join(map(repr, PLACEMENTS))}, or a function of name, "
            f"shape, dtype and the number of servers; got {short_repr(placement)}"
        )


def place(
    variables: Sequence[VariableSpec],
    num_servers: int,
    *,
    partitioner: Partitioner | None = None,
    placement: str | PlacementFunction = "round_robin",
) -> Layout:
    """Returns the layout that assigns each piece of each variable to a server.

    Args:
        placement: ``"round_robin"`` assigns the pieces to the servers in turn, as TensorFlow.
            ``"largest_first"`` assigns the largest remaining piece to the server with the fewest
            bytes. A function takes a name (``weight``, or ``weight/part_0`` for a piece), a
            shape, a dtype and the number of servers, and returns a server's index.

    Raises:
        ValueError: the function returns an invalid index; or as ``num_pieces``.
    """
    check_placement(placement)
    cut = [
        (i, rows)
        for i, variable in enumerate(variables)
        for rows in _cut(variable, None if variable.is_whole else partitioner)
    ]
    sizes = [_bytes_of(variables[i], begin, end) for i, (begin, end, _) in cut]
    if callable(placement):
        servers = [_request(placement, variables[i], *rows, num_servers) for i, rows in cut]
    elif placement == "largest_first":
        servers = _largest_first(sizes, num_servers)
    else:
        servers = [k % num_servers for k in range(len(cut))]
    used, dense_sizes = [0] * num_servers, (0,) * num_servers
    pieces: dict[int, VariablePiece] = {}
    for by_rows in (False, True):
        for k, ((i, (begin, end, _)), size) in enumerate(zip(cut, sizes, strict=True)):
            if variables[i].by_rows == by_rows:
                shape, num_bytes = _shape_of(variables[i], begin, end), size
                pieces[k] = VariablePiece(
                    i, begin, end, shape, servers[k], used[servers[k]], num_bytes
                )
                used[servers[k]] += _aligned(size)
        if not by_rows:
            dense_sizes = tuple(used)
    in_order = tuple(pieces[k] for k in range(len(cut)))
    return Layout(tuple(variables), in_order, tuple(used), dense_sizes)


def _cut(variable: VariableSpec, partitioner: Partitioner | None) -> list[tuple[int, int, str]]:
    """Returns the first row, the end and the name of each piece of a variable."""
    rows = variable.shape[0] if variable.shape else 1
    count = num_pieces(partitioner, variable.name, variable.shape, variable.dtype)
    size, rest = divmod(rows, count)
    starts = [k * size + min(k, rest) for k in range(count + 1)]
    if count == 1:
        return [(0, rows, variable.name)]
    return [
        (begin, end, f"{variable.name}/part_{part}")
        for part, (begin, end) in enumerate(pairwise(starts))
    ]


def _shape_of(variable: VariableSpec, begin: int, end: int) -> tuple[int, ...]:
    return (end - begin, *variable.shape[1:]) if variable.shape else ()


def _bytes_of(variable: VariableSpec, begin: int, end: int) -> int:
    return math.prod(_shape_of(variable, begin, end)) * variable.dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _largest_first(sizes: Sequence[int], num_servers: int) -> list[int]:
    used, servers = [0] * num_servers, [0] * len(sizes)
    for k in sorted(range(len(sizes)), key=lambda k: (-sizes[k], k)):
        servers[k] = used.index(min(used))
        used[servers[k]] += sizes[k]
    return servers


def _request(
    placement: PlacementFunction,
    variable: VariableSpec,
    begin: int,
    end: int,
    name: str,
    num_servers: int,
) -> int:
    server = placement(name, _shape_of(variable, begin, end), variable.dtype, num_servers)
    if not isinstance(server, int) or isinstance(server, bool) or not 0 <= server < num_servers:
        raise ValueError(
            f"a placement function returns the index of a server, 0 to {num_servers - 1}; for "
            f"{name} it has returned {short_repr(server)}"
        )
    return server
