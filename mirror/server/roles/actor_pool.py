"""The servers and workers of one strategy, as actors that an engine has started."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mirror.errors import ActorDied, ServerLostError
from mirror.server.engine.engine_types import Actor, Engine
from mirror.server.engine.process_engine import make_engine

SERVER_ROLE = "mirror.server.shard:ServerRole"
WORKER_ROLE = "mirror.server.roles.worker_role:WorkerRole"


class ActorPool:
    """All servers and workers.

    Args:
        timeout_seconds: the limit for a step of a worker; a server has half of it for a call, so
            that a worker that waits for a stalled server is not taken for a stalled worker.

    Attributes:
        lost: the error to raise once a server is lost, or None.
    """

    def __init__(
        self, engine: Any, num_servers: int, num_workers: int, timeout_seconds: float
    ) -> None:
        self._engine: Engine[Any] = make_engine(engine) if isinstance(engine, str) else engine
        self._on_lost: list[Callable[[], None]] = []
        self.lost: ServerLostError | None = None
        self._timeout_seconds = timeout_seconds
        self._is_closed = False
        try:
            self.servers, self.workers = self._start(num_servers, num_workers)
        except BaseException:
            self._engine.close()
            raise
        pool = weakref.ref(self)
        for index, server in enumerate(self.servers):
            server.on_death(_record_loss(pool, index))

    def _start(self, num_servers: int, num_workers: int) -> tuple[list[Actor], list[Actor]]:
        seed = torch.initial_seed() % 2**62
        with ThreadPoolExecutor(num_servers + num_workers) as threads:
            servers = list(
                threads.map(
                    lambda i: self._engine.start(f"server {i}", SERVER_ROLE, {"index": i}),
                    range(num_servers),
                )
            )
            init = {
                "num_workers": num_workers,
                "servers": [server.address for server in servers],
                "seed": seed + 1,
                "timeout_seconds": self._timeout_seconds / 2,
            }
            workers = list(
                threads.map(
                    lambda i: self._engine.start(f"worker {i}", WORKER_ROLE, {"index": i, **init}),
                    range(num_workers),
                )
            )
        for server in servers:
            server.timeout_seconds = self._timeout_seconds / 2
        for worker in workers:
            worker.timeout_seconds = self._timeout_seconds
        return servers, workers

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Calls a function when a server is lost."""
        self._on_lost.append(callback)

    def check(self) -> None:
        """Raises ServerLostError if a server is lost."""
        if self.lost is not None:
            raise self.lost.with_traceback(None)

    def record_loss(self, index: int) -> None:
        """Records that a server has ended; it is not restarted, since its values are lost."""
        if self._is_closed or self.lost is not None:
            return
        self.lost = ServerLostError(
            f"parameter server {index} of {len(self.servers)} is lost, with the values and "
            "optimizer states it had; start the program again and restore the last checkpoint "
            "(mirror.Checkpoint), into any number of servers"
        )
        for callback in self._on_lost:
            callback()

    def all_servers(self, method: str, header: Any = None, buffers: Sequence[Any] = ()) -> None:
        """Calls a method of every server, and waits for all answers."""
        for answer in [server.call(method, header, buffers) for server in self.servers]:
            answer.result()

    def probe_servers(self) -> None:
        """Calls every server; one that does not answer in time is lost."""
        for answer in [server.call("numbers") for server in self.servers]:
            with contextlib.suppress(ActorDied):
                answer.result()

    def close(self) -> None:
        """Stops all processes."""
        self._is_closed = True
        self._engine.close()


def _record_loss(pool: weakref.ref[ActorPool], index: int) -> Callable[[], None]:
    def record_loss() -> None:
        actors = pool()
        if actors is not None:
            actors.record_loss(index)

    return record_loss
