"""Shard: what one server holds, values and optimizers over them, and how updates get there.

[Note: One number for an update]
Asynchronously, a gradient is applied when it arrives. Synchronously an update is the mean of the
first so many gradients that were computed from the values after the last one, and all servers must
take those of the same steps. So one of them, the leader, numbers the updates::

    worker      pushes to all others, which put the gradient by; then to the leader
    leader      takes it, or drops it, if the update it was for has been made; the one that makes
                the number full is an update: a commit, the list of the steps it is the mean of
    others      hear of a commit by whoever pulls from them, who has pulled from the leader first

Whoever computes a gradient has pulled, so no server is more than one commit behind, and nobody
waits for another process inside a server.

[Note: Steps that count once]
A push is known by its step and its number in that step. A step that goes to a second worker, for
the first is lost, may push again: a server that has applied a push says so and forgets the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.server.optimizer_messages import State
from mirror.server.server_optimizers import rebuild, set_options
from mirror.server.shard_updates import Update, mean
from mirror.server.tensor_bytes import Bytes, Spec, as_bytes, pack, unpack

Key = tuple[int, int, int]  # step, number of the push in it, attempt
Commit = dict[str, Any]


@dataclass(frozen=True)
class PieceSpec:
    """What a shard is told of a piece.

    Attributes:
        variable: its index.
        is_buffer: whether it has no gradients, but changes.
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
    """Which push this is.

    Attributes:
        optimizer: whose step it is, by index; ``None`` changes buffers alone.
        based_on: the version that was pulled; of a synchronous one, the number of the
            optimizer's updates then.
        examples: how many examples the gradient is the mean of.
        done_below: steps with smaller numbers will not be heard of again.
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
    """Gradients for an optimizer's next update."""

    num_updates: int = 0
    pushes: dict[Key, tuple[float, Update]] = field(default_factory=dict)
    commit: Commit | None = None


class Shard:
    """The pieces that a server has.

    Args:
        pieces: in the order of the layout.
        num_bytes, dense_bytes: of the buffer, and of its part that is pulled as a whole.
        to_aggregate: of how many gradients a synchronous update is the mean; ``None``: each
            gradient is applied when it arrives.
        max_staleness: by how many updates a gradient may be late.
        is_leader: whether it numbers synchronous updates, and says what is too stale.

    Attributes:
        version: how often values have changed.
        staleness: how many pushes were late by how many updates.
        counts: of pushes: applied, dropped, repeated.
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
        self.counts: Counter[str] = Counter()
        self._decided: dict[tuple[int, int], str] = {}
        self._gathered: list[_Gathered] = []

    def _view(self, piece: PieceSpec) -> Tensor:
        count = torch.Size(piece.shape).numel() * piece.dtype.itemsize
        bytes_of = self.values[piece.offset : piece.offset + count]
        return bytes_of.view(piece.dtype).view(piece.shape)

    @property
    def is_sync(self) -> bool:
        """Whether an update is the mean of several gradients."""
        return self._to_aggregate is not None

    # What the coordinator does

    def assign(self, pieces: Sequence[int], packed: Any) -> None:
        """Sets pieces; gradients that wait for others were computed from what is no more."""
        values = unpack(packed, [self.pieces[i].spec for i in pieces])
        for i, value in zip(pieces, values, strict=True):
            self.tensors[i].copy_(value)
        self.version += 1
        for gathered in self._gathered:
            self.counts["dropped"] += len(gathered.pushes) * self._is_leader
            gathered.pushes.clear()
            gathered.num_updates += 1
            gathered.commit = None

    def add_optimizer(self, description: Mapping[str, Any]) -> None:
        """Makes an optimizer over the pieces of its variables that are here."""
        of_variable: dict[int, list[nn.Parameter]] = {}
        for piece, parameter in zip(self.pieces, self.parameters, strict=True):
            of_variable.setdefault(piece.variable, []).append(parameter)
        self.optimizers.append(rebuild(description, lambda index: of_variable.get(index, [])))
        self._gathered.append(_Gathered())

    def set_options(self, optimizer: int, options: Sequence[Mapping[str, Any]]) -> None:
        """Sets an optimizer's hyperparameters."""
        set_options(self.optimizers[optimizer], options)

    def states(self, optimizer: int) -> dict[int, State]:
        """Returns an optimizer's state, by piece."""
        found = self.optimizers[optimizer].state
        return {i: found[p] for i, p in enumerate(self.parameters) if p in found}

    def set_states(self, optimizer: int, states: Mapping[int, State]) -> None:
        """Puts states in place of those that an optimizer has."""
        self.optimizers[optimizer].state.clear()
        for i, state in states.items():
            self.optimizers[optimizer].state[self.parameters[i]] = state

    # What workers do

    def pull(
        self, known: int, commits: Iterable[Commit] = (), large: Sequence[int] = ()
    ) -> tuple[int, list[Bytes]]:
        """Returns the version and the values, but for tables; no values, if they are known.

        Args:
            known: the version that the caller has.
            commits: those that the leader has told of.
            large: pieces that are wanted as buffers of their own, after one of all others.
        """
        for commit in commits:
            self.apply(commit)
        if known == self.version:
            return self.version, []
        if not large:
            return self.version, [as_bytes(self.values[: self._dense_bytes])]
        apart = set(large)
        rest = [
            tensor
            for i, (piece, tensor) in enumerate(zip(self.pieces, self.tensors, strict=True))
            if i not in apart and piece.offset < self._dense_bytes
        ]
        return self.version, [pack(rest), *(as_bytes(self.tensors[i]) for i in large)]

    def pull_rows(self, piece: int, rows: Tensor) -> Tensor:
        """Returns rows of a table's piece."""
        return self.tensors[piece].index_select(0, rows)

    def updates(self) -> list[int]:
        """Returns how many updates every optimizer has made."""
        return [gathered.num_updates for gathered in self._gathered]

    def commits(self) -> list[Commit]:
        """Returns every optimizer's last update, for the servers that follow."""
        return [gathered.commit for gathered in self._gathered if gathered.commit is not None]

    def push(self, push: PushMessage, update: Update) -> str:
        """Takes a worker's gradients.

        Returns:
            ``"applied"``, ``"gathered"``, ``"dropped"``, or ``"repeated"``, of a push that has
            been applied or gathered before.
        """
        for key in [key for key in self._decided if key[0] < push.done_below]:
            del self._decided[key]
        if push.optimizer is None:
            return self._once(push, lambda: self._change(update))
        if self._to_aggregate is not None:
            return self._gather(push, self._gathered[push.optimizer], update)
        late = self.version - push.based_on

        def apply() -> str:
            if self._is_leader:
                self.staleness[late] += 1
                if self._max_staleness is not None and late > self._max_staleness:
                    return "dropped"
            return self._step(push.optimizer, update)

        return self._once(push, apply)

    def _once(self, push: PushMessage, action: Any) -> str:
        key = push.step, push.number
        before = self._decided.get(key)
        if before is not None:
            self.counts["repeated"] += 1
            return "dropped" if before == "dropped" else "repeated"
        found: str = action()
        self._decided[key] = found
        self.counts[found] += 1
        return found

    def _gather(self, push: PushMessage, gathered: _Gathered, update: Update) -> str:
        key = push.step, push.number, push.attempt
        if not self._is_leader:  # it waits for what the leader says
            if push.based_on >= gathered.num_updates:
                gathered.pushes[key] = push.examples, update
            return "gathered"

        def gather() -> str:
            self.staleness[gathered.num_updates - push.based_on] += 1
            if push.based_on != gathered.num_updates:
                return "dropped"
            gathered.pushes[key] = push.examples, update
            if len(gathered.pushes) == self._to_aggregate:
                self._commit(push.optimizer or 0, list(gathered.pushes))
                return "applied"
            return "gathered"

        return self._once(push, gather)

    def apply(self, commit: Commit) -> None:
        """Makes the update that the leader has made, if it has not been made here."""
        gathered = self._gathered[commit["optimizer"]]
        if commit["update"] == gathered.num_updates:
            self._commit(commit["optimizer"], [tuple(key) for key in commit["pushes"]])

    def _commit(self, optimizer: int, keys: Sequence[Any]) -> None:
        gathered = self._gathered[optimizer]
        pushes = [gathered.pushes[key] for key in keys]
        self._step(optimizer, mean([u for _, u in pushes], [weight for weight, _ in pushes]))
        gathered.commit = {
            "optimizer": optimizer,
            "update": gathered.num_updates,
            "pushes": [list(key) for key in keys],
        }
        gathered.num_updates += 1
        gathered.pushes.clear()

    def _step(self, optimizer: int | None, update: Update) -> str:
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

    def _change(self, update: Update) -> str:
        for i, change in update.changes.items():
            if self.pieces[i].dtype == torch.bool:
                self.tensors[i].copy_(change)
            else:
                self.tensors[i].add_(change)
        self.version += 1
        return "applied"
