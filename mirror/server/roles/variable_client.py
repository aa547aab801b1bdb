"""A process's copy of all variables, which it pulls from the servers and pushes to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.base.bitwise import same_bits
from mirror.errors import StrategyError
from mirror.server.engine.engine_types import ActorClient, Future
from mirror.server.server_messages import (
    LARGE,
    Update,
    as_bytes,
    as_tensor,
    is_plain,
    pack,
    packed_size,
    rows_of,
    unpack,
)
from mirror.server.servers_report import Traffic
from mirror.server.shard import PushMessage, PushResult
from mirror.server.variable_placement import Layout, VariablePiece


@dataclass
class _Rows:
    """The rows of a table that are up to date in this process."""

    pulled: set[int] = field(default_factory=set)
    is_whole: bool = False


class VariableClient:
    """The variables of all servers, as tensors of this process.

    Args:
        tensors: one for each variable of the layout.
        is_sync: whether updates are synchronous, and numbered by the first server.
        asks_first: whether the first server may drop a push for its staleness.

    Attributes:
        is_fresh: whether the tensors are up to date; tables only where their rows were pulled.
        versions: the version of each server's values.
        updates, commits: the first server's; see ``Shard``.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[Tensor],
        servers: Sequence[ActorClient],
        *,
        is_sync: bool,
        asks_first: bool = False,
    ) -> None:
        self.layout, self.tensors, self.servers = layout, list(tensors), list(servers)
        self.traffic = Traffic()
        self._is_sync, self._asks_first = is_sync, asks_first
        # - Pieces, by server
        self._pieces = [layout.pieces_of_server(server) for server in range(len(self.servers))]
        self._dense = [
            [piece for piece in own if not layout.variables[piece.variable].by_rows]
            for own in self._pieces
        ]
        self._index = {
            (k, piece.variable, piece.begin): i
            for k, own in enumerate(self._pieces)
            for i, piece in enumerate(own)
        }
        # - State of the last pull
        self.versions = [-1] * len(self.servers)
        self.updates: list[int] = []
        self.commits: list[Any] = []
        self.is_fresh = False
        self._tables = {i: _Rows() for i, v in enumerate(layout.variables) if v.by_rows}
        self._bases: dict[int, Tensor] = {}
        self._tensor_versions: dict[int, int] = {}
        self._lock = threading.RLock()

    # - Pulling

    def pull(self) -> None:
        """Pulls all variables except tables."""
        with self._lock:
            begun = perf_counter()
            if self._is_sync:
                self._request_values(0)()  # the followers need the commits in its answer
                servers = range(1, len(self.servers))
            else:
                servers = range(len(self.servers))
            for receive in [self._request_values(k) for k in servers]:
                receive()
            self._forget_rows()
            self.is_fresh = True
            self.traffic.num_pulls += 1
            self.traffic.pull_seconds += perf_counter() - begun

    def _request_values(self, server: int) -> Callable[[], None]:
        """Requests a server's values; returns a function that waits and stores them.

        Large pieces are received in the tensors' own memory, the others in one buffer.
        """
        pieces = self._dense[server]
        large = [p for p in pieces if p.num_bytes >= LARGE and is_plain(self._part(p))]
        separate = {id(piece) for piece in large}
        small = [piece for piece in pieces if id(piece) not in separate]
        indices = [self._index[server, piece.variable, piece.begin] for piece in large]
        header = {
            "known": self.versions[server],
            "commits": self.commits if server else [],
            "large": indices,
        }
        into = [as_bytes(self._part(piece)) for piece in large]
        specs = [(piece.shape, self.layout.variables[piece.variable].dtype) for piece in small]
        packed = np.empty(packed_size(specs), np.uint8)
        reply = self.servers[server].call("pull", header, into=[packed, *into] if large else None)

        def receive() -> None:
            header, buffers = reply.result()
            self.versions[server] = header["version"]
            if server == 0:
                self.updates, self.commits = header["updates"], header["commits"]
            if not buffers:
                return
            self.traffic.pulled_bytes += sum(map(len, buffers))
            with torch.no_grad():
                if large:
                    values = unpack(buffers[0], specs)
                else:
                    flat = as_tensor(buffers[0], torch.uint8)
                    values = [
                        flat[p.offset : p.offset + p.num_bytes].view(dtype).view(shape)
                        for p, (shape, dtype) in zip(small, specs, strict=True)
                    ]
                for piece, value in zip(small, values, strict=True):
                    self._part(piece).copy_(value)
                for piece, target, buffer in zip(large, into, buffers[1:], strict=True):
                    if buffer is target:  # received in place, which torch does not know
                        torch.autograd.graph.increment_version(self.tensors[piece.variable])
                    else:
                        dtype = self.layout.variables[piece.variable].dtype
                        self._part(piece).copy_(as_tensor(buffer, dtype).view(piece.shape))
            for piece in pieces:
                self._record_version(piece.variable)

        return receive

    def _part(self, piece: VariablePiece, tensor: Tensor | None = None) -> Tensor:
        whole = self.tensors[piece.variable].detach() if tensor is None else tensor
        return whole[piece.begin : piece.end] if piece.shape else whole

    def _record_version(self, variable: int) -> None:
        tensor = self.tensors[variable]
        self._tensor_versions[variable] = tensor._version
        if self.layout.variables[variable].is_whole:
            self._bases[variable] = tensor.detach().clone()

    def pull_rows(self, variable: int, ids: Tensor) -> None:
        """Pulls the rows of a table that are not up to date."""
        table = self._tables[variable]
        if table.is_whole:
            return
        wanted = [row for row in ids.unique().tolist() if row not in table.pulled]
        if not wanted:
            return
        with self._lock:
            begun = perf_counter()
            rows = torch.tensor(sorted(wanted))
            replies = []
            for piece in self.layout.pieces_of_variable(variable):
                own = rows[(rows >= piece.begin) & (rows < piece.end)]
                if len(own):
                    header = {"piece": self._index[piece.server, variable, piece.begin]}
                    sent = [as_bytes(own - piece.begin)]
                    reply = self.servers[piece.server].call("pull_rows", header, sent)
                    replies.append((own, reply))
            for own, reply in replies:
                self._store_rows(variable, own, reply.result()[1][0])
            table.pulled.update(wanted)
            self.traffic.pull_seconds += perf_counter() - begun

    def pull_tables(self) -> None:
        """Pulls all rows of all tables."""
        for variable, table in self._tables.items():
            if not table.is_whole:
                with self._lock:
                    for piece in self.layout.pieces_of_variable(variable):
                        header = {
                            "piece": self._index[piece.server, variable, piece.begin],
                            "rows": [0, piece.end - piece.begin],
                        }
                        _, buffers = self.servers[piece.server].call("pull_rows", header).result()
                        self._store_rows(
                            variable, torch.arange(piece.begin, piece.end), buffers[0]
                        )
                    table.is_whole = True

    def _store_rows(self, variable: int, rows: Tensor, packed: Any) -> None:
        self.traffic.pulled_bytes += len(packed)
        tensor = self.tensors[variable]
        values = as_tensor(packed, tensor.dtype).view(len(rows), *tensor.shape[1:])
        with torch.no_grad():
            tensor.index_copy_(0, rows.to(tensor.device), values.to(tensor.device))
        self._record_version(variable)

    def _forget_rows(self) -> None:
        """Fills pulled rows with NaN: they are old now, and must not be read."""
        for variable, table in self._tables.items():
            if table.pulled or table.is_whole:
                with torch.no_grad():
                    if table.is_whole:
                        self.tensors[variable].fill_(torch.nan)
                    else:
                        rows = torch.tensor(sorted(table.pulled))
                        self.tensors[variable].index_fill_(0, rows, torch.nan)
                self._tables[variable] = _Rows()
            self._record_version(variable)

    def keep_tables(self) -> None:
        """Records that the tables are up to date: this process has created them."""
        for table in self._tables.values():
            table.is_whole = True

    # - Pushing

    def find_changed(self) -> list[int]:
        """Returns the variables that the program has changed in place since the last pull.

        Buffers are compared by value, since normalization layers do not change the version of
        their buffers.
        """
        return [
            i
            for i, version in self._tensor_versions.items()
            if self.tensors[i]._version != version or self._is_changed_buffer(i)
        ]

    def _is_changed_buffer(self, variable: int) -> bool:
        base = self._bases.get(variable)
        return base is not None and not same_bits(base, self.tensors[variable])

    def mark_synced(self) -> None:
        """Records that the servers have the same values as this process."""
        for variable in range(len(self.tensors)):
            self._record_version(variable)

    def push(self, push: PushMessage, members: Sequence[int], names: Sequence[str]) -> PushResult:
        """Pushes the gradients of ``members`` and the changes of buffers.

        Raises:
            StrategyError: the step has changed a parameter in place.
        """
        with self._lock:
            begun = perf_counter()
            num_parameters = sum(not v.is_whole for v in self.layout.variables)
            for variable in self.find_changed():
                if variable < num_parameters:
                    raise StrategyError(
                        f"a step has changed the parameter {names[variable]} in place; in a step "
                        "only optimizers change parameters, on the servers; change it between "
                        "steps, in the coordinator's process, after join"
                    )
            updates = [
                self._collect_update(server, members) for server in range(len(self.servers))
            ]
            result = self._send(push, updates)
            self.is_fresh = False
            self.traffic.num_pushes += 1
            self.traffic.push_seconds += perf_counter() - begun
        return result

    def pulled_version(self, optimizer: int | None) -> int:
        """Returns the number of the pulled values, from which servers compute the staleness."""
        if self._is_sync and optimizer is not None:
            return self.updates[optimizer]
        return self.versions[0]

    def _send(self, push: PushMessage, updates: Sequence[Update]) -> PushResult:
        """Sends an update to all servers; returns the leader's result."""
        leader, followers = 0, list(range(1, len(self.servers)))
        if self._is_sync:  # the leader numbers the updates, see shard.py
            for reply in [self._begin_push(k, push, updates[k]) for k in followers]:
                reply.result()
            followers = []
        first = self._begin_push(leader, push, updates[leader])
        if self._asks_first and first.result()[0]["result"] == PushResult.DROPPED:
            return PushResult.DROPPED
        replies = [self._begin_push(k, push, updates[k]) for k in followers]
        header = first.result()[0]
        for reply in replies:
            reply.result()
        return PushResult(header["result"])

    def _begin_push(self, server: int, push: PushMessage, update: Update) -> Future:
        header, buffers = update.message()
        self.traffic.pushed_bytes += sum(map(len, buffers))
        message = {"push": asdict(push), "update": header}
        return self.servers[server].call("push", message, buffers)

    def _collect_update(self, server: int, members: Sequence[int]) -> Update:
        """Returns the gradients and changes for a server."""
        update, wanted = Update(), set(members)
        for i, piece in enumerate(self._pieces[server]):
            if piece.variable in self._bases:
                change = self._change(piece.variable)
                if change is not None:
                    update.changes[i] = change
            elif piece.variable in wanted:
                gradient = self.tensors[piece.variable].grad
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    update.rows[i] = rows_of(gradient, piece)
                elif self.layout.variables[piece.variable].by_rows:
                    rows = torch.arange(piece.end - piece.begin)
                    update.rows[i] = rows, self._part(piece, gradient.detach())
                else:
                    update.gradients[i] = self._part(piece, gradient.detach())
        return update

    def _change(self, variable: int) -> Tensor | None:
        tensor, base = self.tensors[variable], self._bases[variable]
        now = tensor.detach()
        if same_bits(base, now):
            return None
        return now if now.dtype == torch.bool else now - base

    # - Writing, in the coordinator's process

    def assign(self, variables: Sequence[int]) -> None:
        """Sends this process's values of some variables to the servers."""
        wanted = set(variables)
        replies = []
        for server, own in enumerate(self._pieces):
            pieces = [i for i, piece in enumerate(own) if piece.variable in wanted]
            packed = pack([self._part(own[i]) for i in pieces])
            header = {"pieces": pieces, "commits": self.commits if server else []}
            replies.append(self.servers[server].call("assign", header, [packed]))
        for reply in replies:
            reply.result()
        for variable in variables:
            self._record_version(variable)
