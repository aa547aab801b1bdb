"""The engine of a cluster: the actors are Ray actors.

Large buffers go through Ray's object store, which all processes of a machine read without a copy.
A method can mark a result that many clients ask for: all answers with ``{"once": 7}`` in their
header have the same buffers. These are stored once, until an answer has another value. Small
buffers go in the answer itself.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from time import monotonic, sleep
from typing import Any

from mirror.errors import BackendError, first_line

try:
    import ray
except ImportError:
    raise BackendError("engine='ray' needs Ray: pip install 'mirror-strategy[ray]'") from None
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mirror.server.engine.connection import decode_error
from mirror.server.engine.engine_types import (
    ActorDied,
    BaseEngine,
    Header,
    Liveness,
    run_in_threads,
)
from mirror.server.engine.ray_client import (
    NAMESPACE,
    RayClient,
    RoleActor,
    as_json,
)
from mirror.server.engine.service_loop import resolve_role

# On Linux, Ray's services listen on all networks. On macOS they listen on loopback only, unless
# this constant is set. Ray reads it when it is imported, in its own processes as well.
_CONSTANTS, _CONSTANT = "ray._private.ray_constants", "ENABLE_RAY_CLUSTER"
_LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray gives its actors niceness 15, so that they would hardly run on a busy machine.
    "RAY_worker_niceness": "0",
}
_NAME_SECONDS = 30.0  # how long the name of an actor that ended may stay taken
_POLL_SECONDS = 0.1
_KILL_SECONDS = 30.0
_DEATH_NOTICE_SECONDS = 1.0


class RayEngine(BaseEngine["RayActor"]):
    """Starts actors on the cluster that this program is connected to, or on this machine.

    Args:
        address: of a cluster, as for ``ray.init``. With None, the engine uses the cluster that
            ``ray.init`` has connected to, or that of ``RAY_ADDRESS``, or a new one on this
            machine's loopback.
        num_cpus: the CPUs that each actor reserves. With 0, a node may run any number of actors.
    """

    def __init__(self, address: str | None = None, *, num_cpus: float = 0) -> None:
        super().__init__()
        self._owns_ray = not ray.is_initialized()
        self._num_cpus = num_cpus
        address = address or os.environ.get("RAY_ADDRESS")  # set in a Ray job
        if self._owns_ray and address:
            ray.init(address=address, namespace=NAMESPACE)
        elif self._owns_ray:
            init_local()
        self.id = secrets.token_hex(8)
        self._numbers = count()
        threading.Thread(target=self._watch, name="ray actors", daemon=True).start()

    def _make(self, name: str, role: str, init: Header) -> RayActor:
        return RayActor(name, self.id, next(self._numbers), role, init, self._num_cpus)

    def close(self) -> None:
        """See ``Engine``."""
        if self._is_closed:
            return
        self._is_closed = True
        for actor in self._actors:
            actor.stop()
        if self._owns_ray:
            ray.shutdown()

    def _watch(self) -> None:
        """Records which actors have ended, until the engine is closed."""
        while not self._is_closed:
            exit_refs = {actor.exit_ref: actor for actor in list(self._actors) if actor.alive}
            if not exit_refs:
                sleep(_POLL_SECONDS)
                continue
            try:
                ended, _ = ray.wait(list(exit_refs), timeout=_POLL_SECONDS)
            except Exception:  # Ray itself has ended
                return
            for ref in ended:
                exit_refs[ref].record_end(ref)


class RayActor(RayClient):
    """A Ray actor, as the program that started it sees it.

    Attributes:
        exit_ref: the result of a method that never returns; ``ray.wait`` returns it when the
            actor's process has ended.
    """

    def __init__(
        self, name: str, engine: str, number: int, role: str, init: Header, num_cpus: float
    ) -> None:
        actor = f"{engine}-{number}-{name}"
        super().__init__({"engine": "ray", "name": name, "actor": actor})
        self._number, self._num_cpus = number, num_cpus
        self._role, self._init = role, as_json(init)
        self._lock = threading.RLock()
        self._liveness = Liveness()
        self._own: Any = None
        self.exit_ref: Any = None

    @property
    def alive(self) -> bool:
        """See ``Actor``."""
        return self._liveness.is_alive

    def on_death(self, callback: Callable[[], None]) -> None:
        """See ``Actor``."""
        self._liveness.on_death(callback)

    def kill(self) -> None:
        """See ``Actor``."""
        if self._own is not None:
            ray.kill(self._own)
            self._liveness.wait(_KILL_SECONDS)

    def restart(self) -> None:
        """See ``Actor``."""
        with self._lock:
            self._liveness.check_open(self.name)
            self.kill()
            self._own = self._handle = handle = self._create()
            try:
                kind, header, buffers = ray.get(handle.make.remote(self._role, self._init))
            except RayActorError as error:
                raise ActorDied(
                    self.name, f"the process ended while starting ({first_line(error)})"
                ) from None
            if kind == "raised":
                raise decode_error(header, buffers)
            self.exit_ref = handle.block_forever.options(concurrency_group="watched").remote()
            self._liveness.begin(self.exit_ref)

    def forget(self) -> None:
        """See ``RayClient``; waits until the engine has noticed the end as well."""
        super().forget()
        self._liveness.wait(_DEATH_NOTICE_SECONDS)

    def end_stalled(self) -> None:
        """See ``RayClient``."""
        self.kill()

    def record_end(self, ref: Any) -> None:
        """Records that the process with this ``exit_ref`` has ended."""
        run_in_threads(self._liveness.end(ref))

    def stop(self) -> None:
        """Ends the process; the actor cannot be restarted."""
        self._liveness.closed.set()
        if self._own is not None:
            ray.kill(self._own)
        self._liveness.end(self.exit_ref)

    def _create(self) -> Any:
        is_concurrent = _is_concurrent(self._role)
        host = ray.remote(concurrency_groups={"watched": 1})(RoleActor).options(
            name=self._address["actor"],
            namespace=NAMESPACE,
            num_cpus=self._num_cpus,
            scheduling_strategy=scheduling_strategy(self._number, self._num_cpus),
            max_restarts=0,
            max_concurrency=256 if is_concurrent else 1,
        )
        deadline = monotonic() + _NAME_SECONDS
        while True:
            try:
                return host.remote(self.name)
            except ValueError:  # the actor that ended still has the name, for a moment
                if monotonic() > deadline:
                    raise
                sleep(0.05)


def _is_concurrent(path: str) -> bool:
    try:
        return bool(getattr(resolve_role(path), "concurrent", False))
    except Exception:  # the actor's process raises the error
        return False


def init_local() -> None:
    """Starts Ray on this machine; its services listen on loopback only."""
    with _local_settings():
        ray.init(
            namespace=NAMESPACE,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
        )


@contextmanager
def _local_settings() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _LOCAL}
    constants = sys.modules.get(_CONSTANTS)
    constant = getattr(constants, _CONSTANT, None)
    os.environ.update(_LOCAL)
    try:
        if constant is not None:
            setattr(constants, _CONSTANT, False)
        yield
    finally:
        if constant is not None:
            setattr(constants, _CONSTANT, constant)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def nodes_for_actors(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the ids of the nodes that run actors, from the result of ``ray.nodes``.

    A node that declares no CPUs, as the head of a cluster often does, runs none, unless no node
    has CPUs.
    """
    alive = [node for node in nodes if node["Alive"]]
    with_cpus = [node for node in alive if node["Resources"].get("CPU", 0) > 0]
    return sorted(node["NodeID"] for node in with_cpus or alive)


def scheduling_strategy(number: int, num_cpus: float) -> Any:
    """Returns Ray's scheduling strategy for an actor: actors go to the nodes in turn.

    If an actor needs CPUs, Ray finds a node with free ones. Without this strategy, Ray often puts
    all actors that need none on one node. If the node has left, or Ray does not know it yet, Ray
    selects another.

    Args:
        number: the index of the actor in its engine.
        num_cpus: how many CPUs the actor needs.
    """
    nodes = nodes_for_actors(ray.nodes())
    if num_cpus or not nodes:
        return "SPREAD"
    return NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=True)
