"""The shard of one server: values, optimizers over them, and how pushed gradients update them.

Asynchronously, a gradient is applied when it arrives. Synchronously, an update is the mean of the
first ``to_aggregate`` gradients that were computed from the current values, and all servers must
average the gradients of the same steps. So one server, the leader, numbers the updates::

    worker      pushes to the followers, which store the gradient, and then to the leader
    leader      stores the gradient too, or drops it if the update has been made already; the
                last gradient that is needed makes the update and a commit: the list of its steps
    follower    receives the commit from the next worker that pulls, and makes the same update

A worker pulls from the leader first, and pulls before it computes a gradient. So a follower is at
most one commit behind, and no server waits for another process.

A step that has lost its worker runs again and may push again. A server identifies a push by its
step and its number in the step. It applies the first one, and answers REPEATED to the second.

``ServerRole`` is the actor of a server: it decodes the messages for its shard.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.replica.optimizers.optimizer_traits import rebuild, set_options
from mirror.server import server_messages
from mirror.server.server_messages import (
    Bytes,
    Spec,
    State,
    Update,
    as_bytes,
    as_tensor,
    mean_of_updates,
    pack,
    unpack,
)

Key = tuple[int, int, int]  # step, number of the push in the step, attempt
Commit = dict[str, Any]


class PushResult(str, Enum):
    """The effect of a push on a server."""

    APPLIED = "applied"
    """The values have changed."""
    GATHERED = "gathered"
    """The gradient waits for the other gradients of its synchronous update."""
    DROPPED = "dropped"
    """The gradient came too late."""
    REPEATED = "repeated"
    """The same push was applied or gathered before."""


@dataclass(frozen=True)
class PieceSpec:
    """A piece of a variable in a shard.

    Attributes:
        variable: the index of the variable.
        offset: the offset of its first byte in the shard's buffer.
        is_buffer: whether it belongs to a buffer, which has changes instead of gradients.
    """

    variable: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    is_buffer: bool = False

    @property
    def spec(self) -> Spec:
        return self.shape, self.dtype


@dataclass(frozen=True)
class PushMessage:
    """The header of a push.

    Attributes:
        step: the number of the scheduled step.
        number: the number of the push in the step; -1 for changes of buffers.
        attempt: how many workers were lost with the step.
        optimizer: the index of the optimizer that steps; None changes only buffers.
        based_on: the version of the pulled values; if updates are synchronous, the number of the
            optimizer's updates at that time.
        examples: the number of examples that the gradient is the mean of.
        done_below: steps with smaller numbers send no more pushes.
    """

    step: int
    number: int
    attempt: int
    optimizer: int | None
    based_on: int
    examples: float
    done_below: int = 0


@dataclass
class _Gathered:
    """Gradients that wait for an optimizer's next synchronous update."""

    num_updates: int = 0
    pushes: dict[Key, tuple[float, Update]] = field(default_factory=dict)
    commit: Commit | None = None


class Shard:
    """The pieces of one server.

    Args:
        pieces: in the order of the layout.
        num_bytes: the size of the buffer with all pieces.
        dense_bytes: the size of the buffer's first part, which is pulled as a whole.
        to_aggregate: the number of gradients in a synchronous update. With None, each gradient is
            applied when it arrives.
        max_staleness: by how many updates a gradient may be late.
        is_leader: whether this shard numbers synchronous updates and drops stale gradients.

    Attributes:
        version: the number of changes of the values.
        staleness: counts pushes by the number of updates that they were late.
        counts: counts pushes by their result.
    """

    def __init__(
        self,
        pieces: Sequence[PieceSpec],
        num_bytes: int,
        dense_bytes: int,
        *,
        to_aggregate: int | None = None,
        max_staleness: int | None = None,
        is_leader: bool = True,
    ) -> None:
        self.pieces = tuple(pieces)
        self.values = torch.zeros(num_bytes, dtype=torch.uint8)
        self._dense_bytes = dense_bytes
        self._to_aggregate, self._max_staleness = to_aggregate, max_staleness
        self._is_leader = is_leader
        self.tensors = [self._view(piece) for piece in self.pieces]
        self.parameters = [
            nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())
            for tensor in self.tensors
        ]
        self.optimizers: list[Optimizer] = []
        self.version = 0
        self.staleness: Counter[int] = Counter()
        self.counts: Counter[PushResult] = Counter()
        self._results: dict[tuple[int, int], PushResult] = {}
        self._gathered: list[_Gathered] = []

    def _view(self, piece: PieceSpec) -> Tensor:
        num_bytes = torch.Size(piece.shape).numel() * piece.dtype.itemsize
        data = self.values[piece.offset : piece.offset + num_bytes]
        return data.view(piece.dtype).view(piece.shape)

    @property
    def is_sync(self) -> bool:
        """Whether an update is the mean of several gradients."""
        return self._to_aggregate is not None

    # - Called by the coordinator

    def assign(self, pieces: Sequence[int], packed: Any) -> None:
        """Sets the values of pieces, and drops gathered gradients: they belong to old values."""
        values = unpack(packed, [self.pieces[i].spec for i in pieces])
        for i, value in zip(pieces, values, strict=True):
            self.tensors[i].copy_(value)
        self.version += 1
        for gathered in self._gathered:
            self.counts[PushResult.DROPPED] += len(gathered.pushes) * self._is_leader
            gathered.pushes.clear()
            gathered.num_updates += 1
            gathered.commit = None

    def add_optimizer(self, description: Mapping[str, Any]) -> None:
        """Creates an optimizer over those pieces of its variables that this shard holds."""
        pieces: dict[int, list[nn.Parameter]] = {}
        for piece, parameter in zip(self.pieces, self.parameters, strict=True):
            pieces.setdefault(piece.variable, []).append(parameter)
        self.optimizers.append(rebuild(description, lambda index: pieces.get(index, [])))
        self._gathered.append(_Gathered())

    def set_options(self, optimizer: int, options: Sequence[Mapping[str, Any]]) -> None:
        """Sets an optimizer's hyperparameters."""
        set_options(self.optimizers[optimizer], options)

    def states(self, optimizer: int) -> dict[int, State]:
        """Returns an optimizer's state, by piece."""
        states = self.optimizers[optimizer].state
        return {i: states[p] for i, p in enumerate(self.parameters) if p in states}

    def set_states(self, optimizer: int, states: Mapping[int, State]) -> None:
        """Replaces an optimizer's state."""
        self.optimizers[optimizer].state.clear()
        for i, state in states.items():
            self.optimizers[optimizer].state[self.parameters[i]] = state

    # - Called by workers

    def pull(
        self, known: int, commits: Iterable[Commit] = (), large: Sequence[int] = ()
    ) -> tuple[int, list[Bytes]]:
        """Returns the version, and the values except for tables.

        Args:
            known: the caller's version; if it is current, no values are returned.
            commits: the leader's last commits.
            large: pieces to return as separate buffers, after one buffer with all others.
        """
        for commit in commits:
            self.apply(commit)
        if known == self.version:
            return self.version, []
        if not large:
            return self.version, [as_bytes(self.values[: self._dense_bytes])]
        separate = set(large)
        rest = [
            tensor
            for i, (piece, tensor) in enumerate(zip(self.pieces, self.tensors, strict=True))
            if i not in separate and piece.offset < self._dense_bytes
        ]
        return self.version, [pack(rest), *(as_bytes(self.tensors[i]) for i in large)]

    def pull_rows(self, piece: int, rows: Tensor) -> Tensor:
        """Returns rows of a piece of a table."""
        return self.tensors[piece].index_select(0, rows)

    def updates(self) -> list[int]:
        """Returns the number of synchronous updates of each optimizer."""
        return [gathered.num_updates for gathered in self._gathered]

    def commits(self) -> list[Commit]:
        """Returns the last commit of each optimizer, for the followers."""
        return [gathered.commit for gathered in self._gathered if gathered.commit is not None]

    def push(self, push: PushMessage, update: Update) -> PushResult:
        """Applies or stores a worker's gradients and changes of buffers, once per push."""
        for key in [key for key in self._results if key[0] < push.done_below]:
            del self._results[key]
        if push.optimizer is None:
            return self._apply_once(push, lambda: self._change(update))
        if self._to_aggregate is not None:
            return self._gather(push, self._gathered[push.optimizer], update)
        late = self.version - push.based_on

        def apply() -> PushResult:
            if self._is_leader:
                self.staleness[late] += 1
                if self._max_staleness is not None and late > self._max_staleness:
                    return PushResult.DROPPED
            return self._step(push.optimizer, update)

        return self._apply_once(push, apply)

    def _apply_once(self, push: PushMessage, action: Callable[[], PushResult]) -> PushResult:
        """Calls a function, unless this push came before."""
        key = push.step, push.number
        earlier = self._results.get(key)
        if earlier is not None:
            self.counts[PushResult.REPEATED] += 1
            dropped = earlier is PushResult.DROPPED
            return PushResult.DROPPED if dropped else PushResult.REPEATED
        result = action()
        self._results[key] = result
        self.counts[result] += 1
        return result

    def _gather(self, push: PushMessage, gathered: _Gathered, update: Update) -> PushResult:
        """Stores a gradient for a synchronous update, which the leader numbers."""
        key = push.step, push.number, push.attempt
        if not self._is_leader:  # the gradient waits for the leader's commit
            if push.based_on >= gathered.num_updates:
                gathered.pushes[key] = push.examples, update
            return PushResult.GATHERED

        def gather() -> PushResult:
            self.staleness[gathered.num_updates - push.based_on] += 1
            if push.based_on != gathered.num_updates:
                return PushResult.DROPPED
            gathered.pushes[key] = push.examples, update
            if len(gathered.pushes) == self._to_aggregate:
                self._commit(push.optimizer or 0, list(gathered.pushes))
                return PushResult.APPLIED
            return PushResult.GATHERED

        return self._apply_once(push, gather)

    def apply(self, commit: Commit) -> None:
        """Makes the update of a commit, unless this shard has made it already."""
        gathered = self._gathered[commit["optimizer"]]
        if commit["update"] == gathered.num_updates:
            self._commit(commit["optimizer"], [tuple(key) for key in commit["pushes"]])

    def _commit(self, optimizer: int, keys: Sequence[Any]) -> None:
        gathered = self._gathered[optimizer]
        pushes = [gathered.pushes[key] for key in keys]
        self._step(
            optimizer, mean_of_updates([u for _, u in pushes], [weight for weight, _ in pushes])
        )
        gathered.commit = {
            "optimizer": optimizer,
            "update": gathered.num_updates,
            "pushes": [list(key) for key in keys],
        }
        gathered.num_updates += 1
        gathered.pushes.clear()

    def _step(self, optimizer: int | None, update: Update) -> PushResult:
        used = []
        for i, gradient in update.gradients.items():
            used.append(i)
            self.parameters[i].grad = gradient
        for i, (rows, values) in update.rows.items():
            used.append(i)
            shape = self.pieces[i].shape
            self.parameters[i].grad = torch.sparse_coo_tensor(
                rows.unsqueeze(0), values, shape, check_invariants=True
            )
        try:
            if used and optimizer is not None:
                self.optimizers[optimizer].step()
        finally:
            for i in used:
                self.parameters[i].grad = None
        return self._change(update)

    def _change(self, update: Update) -> PushResult:
        for i, change in update.changes.items():
            if self.pieces[i].dtype == torch.bool:
                self.tensors[i].copy_(change)
            else:
                self.tensors[i].add_(change)
        self.version += 1
        return PushResult.APPLIED


Header = dict[str, Any]
Answer = tuple[Header, Sequence[Any]]


class ServerRole:
    """One parameter server. No method waits for another process."""

    def __init__(self, index: int) -> None:
        torch.set_num_threads(1)
        self._index = index
        self._shard, self._num_shards = Shard([], 0, 0), 0

    def set_up(self, header: Header, buffers: Sequence[Any]) -> None:
        """Creates the shard for a layout, in place of an earlier one."""
        self._shard = Shard(
            pickle.loads(bytes(buffers[0])),
            header["num_bytes"],
            header["dense_bytes"],
            to_aggregate=header["to_aggregate"],
            max_staleness=header["max_staleness"],
            is_leader=self._index == 0,
        )
        self._num_shards += 1

    def assign(self, header: Header, buffers: Sequence[Any]) -> None:
        self._apply_commits(header)
        self._shard.assign(header["pieces"], buffers[0])

    def add_optimizer(self, header: Header, buffers: Sequence[Any]) -> None:
        self._shard.add_optimizer(pickle.loads(bytes(buffers[0])))

    def set_options(self, header: Header, buffers: Sequence[Any]) -> None:
        self._apply_commits(header)
        self._shard.set_options(header["optimizer"], pickle.loads(bytes(buffers[0])))

    def states(self, header: Header, buffers: Sequence[Any]) -> Answer:
        self._apply_commits(header)
        entries, sent = server_messages.encode_states(self._shard.states(header["optimizer"]))
        return {"states": entries}, sent

    def set_states(self, header: Header, buffers: Sequence[Any]) -> None:
        self._apply_commits(header)
        states = server_messages.decode_states(header["states"], buffers)
        self._shard.set_states(header["optimizer"], states)

    def pull(self, header: Header, buffers: Sequence[Any]) -> Answer:
        shard = self._shard
        commits, large = header.get("commits", ()), header.get("large", ())
        version, values = shard.pull(header["known"], commits, large)
        answer = {"version": version, "updates": shard.updates(), "commits": shard.commits()}
        if values and shard.is_sync:  # all workers pull this version; see ray_actor.ONCE
            answer["once"] = [self._num_shards, version, *large]
        return answer, values

    def pull_rows(self, header: Header, buffers: Sequence[Any]) -> Answer:
        if "rows" in header:
            rows = torch.arange(*header["rows"])
        else:
            rows = as_tensor(buffers[0], torch.int64)
        return {}, [as_bytes(self._shard.pull_rows(header["piece"], rows))]

    def push(self, header: Header, buffers: Sequence[Any]) -> Answer:
        pieces = [piece.spec for piece in self._shard.pieces]
        update = Update.from_message(header["update"], buffers, pieces)
        result = self._shard.push(PushMessage(**header["push"]), update)
        return {"result": result}, []

    def numbers(self, header: Header, buffers: Sequence[Any]) -> Answer:
        shard = self._shard
        return {
            "version": shard.version,
            "updates": shard.updates(),
            "staleness": [[late, count] for late, count in sorted(shard.staleness.items())],
            "counts": dict(shard.counts),
            "commits": shard.commits(),
        }, []

    def _apply_commits(self, header: Header) -> None:
        for commit in header.get("commits", ()):
            self._shard.apply(commit)
