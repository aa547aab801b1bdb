"""ServerRole: the actor of a parameter server, which decodes messages for its shard."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from mirror.server import server_messages
from mirror.server.server_messages import Update, as_bytes, as_tensor
from mirror.server.shard import PushMessage, Shard

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
