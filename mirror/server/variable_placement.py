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

A partitioner cuts variables along their first axis, with TensorFlow's numbers of pieces. It is a
function of a shape and a dtype, and returns the number of pieces along each axis, which is 1 for
all but the first axis, or only the number for the first axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from mirror.errors import short_repr
from mirror.values import is_int

Partitioner = Callable[[Sequence[int], torch.dtype], "Sequence[int] | int"]


@dataclass(frozen=True)
class FixedShards:
    """Cuts each variable into ``num_shards`` pieces, or into its rows if it has fewer.

    Raises:
        ValueError: the number is not positive.
    """

    num_shards: int

    def __post_init__(self) -> None:
        _check_positive("num_shards", self.num_shards)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> list[int]:
        return _split_along_rows(shape, self.num_shards)


@dataclass(frozen=True)
class MinSize:
    """Cuts variables into pieces of at least about ``min_shard_bytes``, up to ``max_shards``.

    A variable of ``b`` bytes has ``ceil(b / min_shard_bytes)`` pieces. As in TensorFlow, the last
    ones may be smaller.

    Raises:
        ValueError: a number is not positive.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _check_positive("min_shard_bytes", self.min_shard_bytes)
        _check_positive("max_shards", self.max_shards)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> list[int]:
        num_bytes = math.prod(shape) * dtype.itemsize
        return _split_along_rows(
            shape, min(self.max_shards, -(-num_bytes // self.min_shard_bytes))
        )


@dataclass(frozen=True)
class MaxSize:
    """Cuts variables into pieces of at most ``max_shard_bytes``, or of one row if that is larger.

    Raises:
        ValueError: a number is not positive.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _check_positive("max_shard_bytes", self.max_shard_bytes)
        if self.max_shards is not None:
            _check_positive("max_shards", self.max_shards)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> list[int]:
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        rows_per_shard = max(1, self.max_shard_bytes // max(1, row_bytes))
        shards = -(-shape[0] // rows_per_shard) if shape else 1
        return _split_along_rows(
            shape, shards if self.max_shards is None else min(shards, self.max_shards)
        )


def num_pieces(
    partitioner: Partitioner | None, name: str, shape: Sequence[int], dtype: torch.dtype
) -> int:
    """Returns the number of pieces of a variable, which is 1 for scalars.

    Raises:
        ValueError: the partitioner cuts along another axis, or returns invalid numbers.
    """
    if partitioner is None or not shape:
        return 1
    result = partitioner(torch.Size(shape), dtype)
    counts = [result, *[1] * (len(shape) - 1)] if isinstance(result, int) else result
    if not isinstance(counts, Sequence) or not all(is_int(n) and int(n) >= 1 for n in counts):
        raise ValueError(
            f"a partitioner returns the number of pieces along every axis, integers from 1 on; "
            f"for {name} of shape {tuple(shape)} it has returned {short_repr(result)}"
        )
    if len(counts) != len(shape) or any(n != 1 for n in counts[1:]):
        raise ValueError(
            f"variables are cut along their first axis only, so a partitioner returns "
            f"[n{', 1' * (len(shape) - 1)}] for {name} of shape {tuple(shape)}; it has returned "
            f"{list(counts)}"
        )
    return max(1, min(counts[0], shape[0]))


def _split_along_rows(shape: Sequence[int], shards: int) -> list[int]:
    if not shape:
        return []
    return [max(1, min(shards, shape[0])), *[1] * (len(shape) - 1)]


def _check_positive(name: str, value: object) -> None:
    if not is_int(value) or value < 1:
        raise ValueError(f"{name} must be an integer from 1 on, got {short_repr(value)}")


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

    def pieces_of_server(self, server: int) -> list[VariablePiece]:
        """Returns a server's pieces, by variable and row; messages refer to them by this index."""
        return [piece for piece in self.pieces if piece.server == server]

    def pieces_of_variable(self, variable: int) -> list[VariablePiece]:
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
    sizes = [
        math.prod(_shape_of(variables[i], begin, end)) * variables[i].dtype.itemsize
        for i, (begin, end, _) in cut
    ]
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
                used[servers[k]] += -(-size // ALIGNMENT) * ALIGNMENT
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
