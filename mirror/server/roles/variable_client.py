"""Client: a process's copy of all variables, pulled from the servers and pushed to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.errors import StrategyError
from mirror.server.engine.engine_types import ActorClient as Connection
from mirror.server.servers_report import Traffic
from mirror.server.shard import PushMessage
from mirror.server.shard_updates import Update, rows_of, same_values
from mirror.server.tensor_bytes import (
    LARGE,
    as_bytes,
    as_tensor,
    is_plain,
    pack,
    packed_size,
    unpack,
)
from mirror.server.variable_placement import Layout, VariablePiece


@dataclass
class _Rows:
    """What is here of a table: which rows are up to date, or all."""

    known: set[int] = field(default_factory=set)
    is_whole: bool = False


class VariableClient:
    """Variables as one process has them.

    Args:
        tensors: as the layout's variables.
        is_sync: whether updates are numbered by the first server.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[Tensor],
        servers: Sequence[Connection],
        *,
        is_sync: bool,
        asks_first: bool = False,
    ) -> None:
        self.layout, self.tensors, self.servers = layout, list(tensors), list(servers)
        self.traffic = Traffic()
        self._is_sync, self._asks_first = is_sync, asks_first
        self._pieces = [layout.of_server(server) for server in range(len(self.servers))]
        self._dense = [
            [piece for piece in own if not layout.variables[piece.variable].by_rows]
            for own in self._pieces
        ]
        self._index = {
            (k, piece.variable, piece.begin): i
            for k, own in enumerate(self._pieces)
            for i, piece in enumerate(own)
        }
        self.versions = [-1] * len(self.servers)
        self.updates: list[int] = []
        self.commits: list[Any] = []
        self.is_fresh = False
        self._tables = {i: _Rows() for i, v in enumerate(layout.variables) if v.by_rows}
        self._bases: dict[int, Tensor] = {}
        self._noted: dict[int, int] = {}
        self._lock = threading.RLock()

    # Pulling

    def pull(self) -> None:
        """Brings all variables up to date, but for tables."""
        with self._lock:
            begun = perf_counter()
            if self._is_sync:
                self._asked_values(0)()
                others = range(1, len(self.servers))
            else:
                others = range(len(self.servers))
            for take in [self._asked_values(k) for k in others]:
                take()
            self._forget_rows()
            self.is_fresh = True
            self.traffic.num_pulls += 1
            self.traffic.pull_seconds += perf_counter() - begun

    def _asked_values(self, server: int) -> Callable[[], None]:
        """Asks a server; what it returns waits, and puts the values where they belong.

        Large pieces are received where they are to be, the others together.
        """
        pieces = self._dense[server]
        large = [p for p in pieces if p.num_bytes >= LARGE and is_plain(self._part(p))]
        apart = {id(piece) for piece in large}
        small = [piece for piece in pieces if id(piece) not in apart]
        own = [self._index[server, piece.variable, piece.begin] for piece in large]
        header = {
            "known": self.versions[server],
            "commits": self.commits if server else [],
            "large": own,
        }
        into = [as_bytes(self._part(piece)) for piece in large]
        specs = [(piece.shape, self.layout.variables[piece.variable].dtype) for piece in small]
        first = np.empty(packed_size(specs), np.uint8)
        pending = self.servers[server].call("pull", header, into=[first, *into] if large else None)

        def take() -> None:
            header, buffers = pending.result()
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
                for piece, place, buffer in zip(large, into, buffers[1:], strict=True):
                    if buffer is place:
                        torch.autograd.graph.increment_version(self.tensors[piece.variable])
                    else:
                        dtype = self.layout.variables[piece.variable].dtype
                        self._part(piece).copy_(as_tensor(buffer, dtype).view(piece.shape))
            for piece in pieces:
                self._record(piece.variable)

        return take

    def _part(self, piece: VariablePiece, tensor: Tensor | None = None) -> Tensor:
        whole = self.tensors[piece.variable].detach() if tensor is None else tensor
        return whole[piece.begin : piece.end] if piece.shape else whole

    def _record(self, variable: int) -> None:
        tensor = self.tensors[variable]
        self._noted[variable] = tensor._version
        if self.layout.variables[variable].is_whole:
            self._bases[variable] = tensor.detach().clone()

    def pull_rows(self, variable: int, ids: Tensor) -> None:
        """Brings rows of a table up to date."""
        table = self._tables[variable]
        if table.is_whole:
            return
        wanted = [row for row in ids.unique().tolist() if row not in table.known]
        if not wanted:
            return
        with self._lock:
            begun = perf_counter()
            rows = torch.tensor(sorted(wanted))
            asked = []
            for piece in self.layout.of_variable(variable):
                own = rows[(rows >= piece.begin) & (rows < piece.end)]
                if len(own):
                    header = {"piece": self._index[piece.server, variable, piece.begin]}
                    sent = [as_bytes(own - piece.begin)]
                    answer = self.servers[piece.server].call("pull_rows", header, sent)
                    asked.append((own, answer))
            for own, answer in asked:
                self._put_rows(variable, own, answer.result()[1][0])
            table.known.update(wanted)
            self.traffic.pull_seconds += perf_counter() - begun

    def pull_tables(self) -> None:
        """Brings all tables up to date, whole."""
        for variable, table in self._tables.items():
            if not table.is_whole:
                with self._lock:
                    for piece in self.layout.of_variable(variable):
                        self._pull_piece(variable, piece)
                    table.is_whole = True

    def _pull_piece(self, variable: int, piece: VariablePiece) -> None:
        header = {
            "piece": self._index[piece.server, variable, piece.begin],
            "rows": [0, piece.end - piece.begin],
        }
        answer = self.servers[piece.server].call("pull_rows", header).result()
        self._put_rows(variable, torch.arange(piece.begin, piece.end), answer[1][0])

    def _put_rows(self, variable: int, rows: Tensor, packed: Any) -> None:
        self.traffic.pulled_bytes += len(packed)
        tensor = self.tensors[variable]
        values = as_tensor(packed, tensor.dtype).view(len(rows), *tensor.shape[1:])
        with torch.no_grad():
            tensor.index_copy_(0, rows.to(tensor.device), values.to(tensor.device))
        self._record(variable)

    def _forget_rows(self) -> None:
        """Makes old rows unreadable rather than wrong."""
        for variable, table in self._tables.items():
            if table.known or table.is_whole:
                with torch.no_grad():
                    if table.is_whole:
                        self.tensors[variable].fill_(torch.nan)
                    else:
                        rows = torch.tensor(sorted(table.known))
                        self.tensors[variable].index_fill_(0, rows, torch.nan)
                self._tables[variable] = _Rows()
            self._record(variable)

    def keep_tables(self) -> None:
        """Takes the tables that are here for those of the servers: this process has made them."""
        for table in self._tables.values():
            table.is_whole = True

    # Pushing

    def changed(self) -> list[int]:
        """Returns the variables that somebody else has changed here since the last pull.

        Of buffers the values are compared: normalization layers leave their versions alone.
        """
        return [
            i
            for i, version in self._noted.items()
            if self.tensors[i]._version != version or self._has_other_values(i)
        ]

    def _has_other_values(self, variable: int) -> bool:
        base = self._bases.get(variable)
        return base is not None and not same_values(base, self.tensors[variable].detach())

    def note_all(self) -> None:
        """Takes what is here for what the servers have."""
        for variable in range(len(self.tensors)):
            self._record(variable)

    def push(self, push: PushMessage, members: Sequence[int], names: Sequence[str]) -> str:
        """Pushes gradients of the members, and changes of buffers; returns what was said."""
        with self._lock:
            begun = perf_counter()
            num_parameters = sum(not v.is_whole for v in self.layout.variables)
            for variable in self.changed():
                if variable < num_parameters:
                    raise StrategyError(
                        f"a step has changed the parameter {names[variable]} in place; parameter "
                        "servers hold the values, and optimizers change them: change it between "
                        "steps, in the coordinator's process, after join"
                    )
            updates = [self._update(server, members) for server in range(len(self.servers))]
            said = self._send(push, updates)
            self.is_fresh = False
            self.traffic.num_pushes += 1
            self.traffic.push_seconds += perf_counter() - begun
        return said

    def based_on(self, optimizer: int | None) -> int:
        """Returns the number by which servers know how old the values here are."""
        if self._is_sync and optimizer is not None:
            return self.updates[optimizer]
        return self.versions[0]

    def _send(self, push: PushMessage, updates: Sequence[Update]) -> str:
        leader, others = 0, list(range(1, len(self.servers)))
        if self._is_sync:  # See [Note: One number for an update].
            for answer in [self._sent(k, push, updates[k]) for k in others]:
                answer.result()
            others = []
        first = self._sent(leader, push, updates[leader])
        if self._asks_first:
            said = first.result()[0]
            if said["said"] == "dropped":
                return "dropped"
        answers = [self._sent(k, push, updates[k]) for k in others]
        header = first.result()[0]
        for answer in answers:
            answer.result()
        said_by_leader: str = header["said"]
        return said_by_leader

    def _sent(self, server: int, push: PushMessage, update: Update) -> Any:
        header, buffers = update.message()
        self.traffic.pushed_bytes += sum(map(len, buffers))
        message = {"push": asdict(push), "update": header}
        return self.servers[server].call("push", message, buffers)

    def _update(self, server: int, members: Sequence[int]) -> Update:
        update, own = Update(), set(members)
        for i, piece in enumerate(self._pieces[server]):
            if piece.variable in self._bases:
                change = self._change(piece.variable)
                if change is not None:
                    update.changes[i] = change
            elif piece.variable in own:
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
        if same_values(base, now):
            return None
        return now if now.dtype == torch.bool else now - base

    # What the coordinator's process writes

    def assign(self, variables: Sequence[int]) -> None:
        """Sends the values that are here."""
        wanted = set(variables)
        answers = []
        for server, own in enumerate(self._pieces):
            pieces = [i for i, piece in enumerate(own) if piece.variable in wanted]
            packed = pack([self._part(own[i]) for i in pieces])
            header = {"pieces": pieces, "commits": self.commits if server else []}
            answers.append(self.servers[server].call("assign", header, [packed]))
        for answer in answers:
            answer.result()
        for variable in variables:
            self._record(variable)
