"""The engine of a cluster: actors are actors of Ray.

Buffers go through Ray's object store: they are put there once and read where they are by all
processes of a machine. A method that returns what many will ask for says so in its header:
``{"once": 7}`` is an answer whose buffers are those of every answer of this method with 7; they
are put there once, until an answer says something else. What is small comes with the answer.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from itertools import count
from time import monotonic, sleep
from typing import Any

from mirror.errors import BackendError

try:
    import ray
except ImportError:
    raise BackendError("engine='ray' needs Ray: pip install 'mirror-strategy[ray]'") from None
from ray.exceptions import RayActorError

from mirror.server.engine.actor_process import role as role_of
from mirror.server.engine.base_engine import BaseEngine
from mirror.server.engine.connection import remote_error
from mirror.server.engine.engine_types import ActorDied, Address, Header, WireError
from mirror.server.engine.ray_actor import RoleActor, as_json
from mirror.server.engine.ray_client import RayClient, first_line
from mirror.server.engine.ray_init import NAMESPACE, begin_here, place_of

_NAME_SECONDS = 30.0  # until a name whose actor has ended is free again
_LOOK_SECONDS = 1.0


class RayEngine(BaseEngine["RayActor"]):
    """Starts actors on the cluster that this program is connected to, or on this machine alone.

    Args:
        address: of a cluster, as ``ray.init`` takes it; ``None``: the one that ``ray.init`` has
            connected to already, that of ``RAY_ADDRESS``, or a new one of this machine, on
            loopback.
        num_cpus: that each actor takes; 0: none is reserved, and any machine may have any number.
    """

    def __init__(self, address: str | None = None, *, num_cpus: float = 0) -> None:
        super().__init__()
        self._owns_ray = not ray.is_initialized()
        self._num_cpus = num_cpus
        address = address or os.environ.get("RAY_ADDRESS")  # of who was started by a job of Ray
        if self._owns_ray and address:
            ray.init(address=address, namespace=NAMESPACE)
        elif self._owns_ray:
            begin_here()
        self.id = secrets.token_hex(8)
        self._numbers = count()
        threading.Thread(target=self._watch, name="actors of Ray", daemon=True).start()

    def _make(self, name: str, role: str, init: Header) -> RayActor:
        return RayActor(name, self.id, next(self._numbers), role, init, self._num_cpus)

    def close(self) -> None:
        """See ``Engine``."""
        if self._is_closed:
            return
        self._is_closed = True
        for actor in self._actors:
            actor.end()
        if self._owns_ray:
            ray.shutdown()

    def _watch(self) -> None:
        """Hears which actors have ended."""
        while not self._is_closed:
            stays = {actor.stays: actor for actor in list(self._actors) if actor.alive}
            if not stays:
                sleep(_LOOK_SECONDS / 10)
                continue
            try:
                ended, _ = ray.wait(list(stays), timeout=_LOOK_SECONDS / 10)
            except Exception:  # Ray itself has ended
                return
            for ref in ended:
                stays[ref].note_death(ref)


class RayActor(RayClient):
    """An actor of Ray, as who has started it holds it."""

    def __init__(
        self, name: str, engine: str, number: int, role: str, init: Header, num_cpus: float
    ) -> None:
        actor = f"{engine}-{number}-{name}"
        super().__init__({"engine": "ray", "name": name, "actor": actor})
        self._number, self._num_cpus = number, num_cpus
        self._role, self._init = role, as_json(init)
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._died = threading.Event()
        self._died.set()
        self._is_ended = False
        self._own: Any = None
        self.stays: Any = None

    @property
    def alive(self) -> bool:
        """See ``Actor``."""
        return not self._died.is_set()

    def on_death(self, callback: Callable[[], None]) -> None:
        """See ``Actor``."""
        with self._lock:
            self._callbacks.append(callback)
            if self._own is not None and not self.alive and not self._is_ended:
                threading.Thread(target=callback, daemon=True).start()

    def kill(self) -> None:
        """See ``Actor``."""
        if self._own is not None:
            ray.kill(self._own)
            self._died.wait()

    def restart(self) -> None:
        """See ``Actor``."""
        with self._lock:
            if self._is_ended:
                raise WireError(f"{self.name}: its engine is closed")
            self.kill()
            self._own = self._handle = handle = self._created()
            try:
                kind, header, buffers = ray.get(handle.make.remote(self._role, self._init))
            except RayActorError as error:
                raise ActorDied(
                    self.name, f"ended before it stood ({first_line(error)})"
                ) from None
            if kind == "raised":
                raise remote_error(header, buffers)
            self.stays = handle.block_forever.options(concurrency_group="watched").remote()
            self._died.clear()

    def lost(self) -> None:
        """See ``RayClient``; the news of it comes soon."""
        super().lost()
        self._died.wait(_LOOK_SECONDS)

    def note_death(self, ref: Any) -> None:
        """Notes that the actor has ended, and tells who wants to know."""
        if ref is not self.stays:
            return
        self._died.set()
        for callback in [] if self._is_ended else list(self._callbacks):
            threading.Thread(target=callback, daemon=True).start()

    def end(self) -> None:
        """Ends it for good."""
        self._is_ended = True
        if self._own is not None:
            ray.kill(self._own)
        self._died.set()

    def _created(self) -> Any:
        is_concurrent = _is_concurrent(self._role)
        host = ray.remote(concurrency_groups={"watched": 1})(RoleActor).options(
            name=self._address["actor"],
            namespace=NAMESPACE,
            num_cpus=self._num_cpus,
            scheduling_strategy=place_of(self._number, self._num_cpus),
            max_restarts=0,
            max_concurrency=256 if is_concurrent else 1,
        )
        deadline = monotonic() + _NAME_SECONDS
        while True:
            try:
                return host.remote(self.name)
            except ValueError:  # the name is its predecessor's, for another moment
                if monotonic() > deadline:
                    raise
                sleep(0.05)


def connect(address: Address) -> RayClient:
    """Returns a client of an actor of Ray."""
    return RayClient(address)


def _is_concurrent(path: str) -> bool:
    try:
        return bool(getattr(role_of(path), "concurrent", False))
    except Exception:  # which is told where it is made
        return False
