"""The engine of a cluster: the actors are Ray actors.

Large buffers go through Ray's object store, which all processes of a machine read without a copy.
A method can mark a result that many clients ask for: all answers with ``{"once": 7}`` in their
header have the same buffers. These are stored once, until an answer has another value. Small
buffers go in the answer itself.

``RayClient`` calls a Ray actor from any process of its cluster, and ``RoleActor`` is the class
that Ray runs in the actor.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from time import monotonic, sleep
from typing import Any

import numpy as np

from mirror.errors import BackendError, first_line

try:
    import ray
except ImportError:
    raise BackendError("engine='ray' needs Ray: pip install 'mirror-strategy[ray]'") from None
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mirror.server.engine.actor_process import encode_error, encode_result, method_of, resolve_role
from mirror.server.engine.connection import decode_error
from mirror.server.engine.engine_types import (
    ActorDied,
    Address,
    Answer,
    Array,
    Engine,
    Header,
    Liveness,
    OwnedActor,
    Sendable,
    WireError,
    run_in_threads,
)
from mirror.server.engine.frames import as_array

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
NAMESPACE = "mirror"

ONCE = "once"
"""Key of a header: equal values mean equal buffers, so that Ray stores them only once."""
LARGE = 64 << 10
"""Buffers of this many bytes and more are put into the object store; others go in the answer."""


class RayEngine(Engine["RayActor"]):
    """Starts actors on the cluster that this program is connected to, or on this machine.

    That is the cluster that ``ray.init`` has connected to, or that of ``RAY_ADDRESS``, or a new
    one on this machine's loopback. Actors reserve no CPUs, so a node may run any number of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._owns_ray = not ray.is_initialized()
        address = os.environ.get("RAY_ADDRESS")  # set in a Ray job
        if self._owns_ray and address:
            ray.init(address=address, namespace=NAMESPACE)
        elif self._owns_ray:
            init_local()
        self.id = secrets.token_hex(8)
        self._numbers = count()
        threading.Thread(target=self._watch, name="ray actors", daemon=True).start()

    def _make(self, name: str, role: str, init: Header) -> RayActor:
        return RayActor(name, self.id, next(self._numbers), role, init)

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


class RoleActor:
    """Constructs a role, and answers calls of its methods."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._target: Any = None
        self._stored: dict[str, tuple[Any, list[Any]]] = {}

    def __repr__(self) -> str:
        return self._name  # Ray prints this before each line of the actor's output

    def make(self, role: str, init: Header) -> tuple[str, Header, list[Any]]:
        """Constructs the role; returns ("answer", {}, []), or "raised" and the error."""
        try:
            self._target = resolve_role(role)(**init)
        except BaseException as error:
            return ("raised", *encode_error(error))
        return "answer", {}, []

    def answer(self, method: str, header: Header, *buffers: Any) -> tuple[str, Header, list[Any]]:
        """Calls a method.

        Returns:
            ("answer", header, buffers), or "refs" with references to stored buffers, or "raised"
            with an encoded error.
        """
        try:
            result, arrays = encode_result(method_of(self._target, method)(header, list(buffers)))
            result = as_json(result)
            sent: list[Array] = [as_array(buffer) for buffer in arrays]
        except BaseException as error:
            return ("raised", *encode_error(error))
        if ONCE not in result or sum(array.nbytes for array in sent) < LARGE:
            return "answer", result, sent
        stored = self._stored.get(method)
        if stored is None or stored[0] != result[ONCE]:
            stored = self._stored[method] = result[ONCE], [ray.put(array) for array in sent]
        return "refs", result, stored[1]

    def block_forever(self) -> None:
        """Never returns; a wait for its result ends when the process has ended."""
        threading.Event().wait()


def as_json(header: Header) -> Header:
    """Returns a copy of a header, encoded as JSON and decoded again.

    Raises:
        WireError: the header is not JSON.
    """
    try:
        decoded: Header = json.loads(json.dumps(header))
    except (TypeError, ValueError) as error:
        raise WireError(f"a header is JSON: {error}; send data as buffers") from None
    return decoded


class RayFuture:
    """The future of a call to a Ray actor."""

    def __init__(self, client: RayClient, ref: Any, into: Sequence[Array] | None) -> None:
        self._client, self._ref, self._into = client, ref, into
        self._answer: Answer | None = None
        self._error: Exception | None = None

    def result(self, timeout: float | None = None) -> Answer:
        """See ``Future``."""
        if self._answer is None and self._error is None:
            self._get(timeout)
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def done(self) -> bool:
        """See ``Future``."""
        return self._ref is None or bool(ray.wait([self._ref], timeout=0)[0])

    def fail(self, error: Exception) -> RayFuture:
        """Stores the reason why no answer will come."""
        self._error, self._ref = error, None
        return self

    def _get(self, timeout: float | None) -> None:
        seconds = self._client.timeout_seconds if timeout is None else timeout
        try:
            kind, header, buffers = ray.get(self._ref, timeout=seconds)
            if kind == "refs":
                buffers = ray.get(buffers, timeout=seconds)
        except GetTimeoutError:
            late = f"{self._client.name} has not answered within {seconds:g} s"
            if timeout is not None:
                raise TimeoutError(late) from None
            self._client.end_stalled()
            self.fail(
                ActorDied(self._client.name, f"{late}, the limit for a call (timeout_seconds)")
            )
            return
        except RayActorError as error:
            self._client.forget()
            self.fail(ActorDied(self._client.name, f"its process has ended ({first_line(error)})"))
            return
        if kind == "raised":
            self.fail(decode_error(header, buffers))
        else:
            self._answer = header, self._copy_into(buffers)
        self._ref = None

    def _copy_into(self, buffers: list[Array]) -> list[Array]:
        into = self._into
        if into is None or [(a.dtype, a.shape) for a in into] != [
            (b.dtype, b.shape) for b in buffers
        ]:
            return buffers
        for array, buffer in zip(into, buffers, strict=True):
            np.copyto(array, buffer)
        return list(into)


class RayClient:
    """Calls a Ray actor, which it finds by the actor's name."""

    def __init__(self, address: Address, timeout_seconds: float | None = None) -> None:
        self.name: str = address["name"]
        self.timeout_seconds = timeout_seconds
        self._address = dict(address)
        self._handle: Any = None

    @property
    def address(self) -> Address:
        """See ``ActorClient``."""
        return dict(self._address)

    def call(
        self,
        method: str,
        header: Header | None = None,
        buffers: Sequence[Sendable] = (),
        *,
        into: Sequence[Array] | None = None,
    ) -> RayFuture:
        """See ``ActorClient``."""
        header = as_json(header or {})
        arrays = [as_array(buffer) for buffer in buffers]
        future = RayFuture(self, None, into)
        try:
            handle = self._find()
            ref = handle.answer.remote(method, header, *arrays)
        except (RayActorError, ValueError) as error:
            self.forget()
            return future.fail(
                ActorDied(self.name, f"Ray has no such actor ({first_line(error)})")
            )
        return RayFuture(self, ref, into)

    def close(self) -> None:
        """See ``ActorClient``."""
        self._handle = None

    def forget(self) -> None:
        """Forgets the actor, which has ended; the next call looks for a restarted one."""
        self._handle = None

    def end_stalled(self) -> None:
        """Is called when a call has taken ``timeout_seconds``; an owner kills the process."""

    def _find(self) -> Any:
        if self._handle is None:
            self._handle = ray.get_actor(self._address["actor"], namespace=NAMESPACE)
        return self._handle


class RayActor(OwnedActor, RayClient):
    """A Ray actor, as the program that started it sees it.

    Attributes:
        exit_ref: the result of a method that never returns; ``ray.wait`` returns it when the
            actor's process has ended.
    """

    def __init__(self, name: str, engine: str, number: int, role: str, init: Header) -> None:
        actor = f"{engine}-{number}-{name}"
        super().__init__({"engine": "ray", "name": name, "actor": actor})
        self._number = number
        self._role, self._init = role, as_json(init)
        self._lock = threading.RLock()
        self._liveness = Liveness()
        self._own: Any = None
        self.exit_ref: Any = None

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
        self.confirm_death()

    def record_end(self, ref: Any) -> None:
        """Records that the process with this ``exit_ref`` has ended."""
        run_in_threads(self._liveness.end(ref))

    def stop(self) -> None:
        """See ``Actor``."""
        self._liveness.closed.set()
        if self._own is not None:
            ray.kill(self._own)
        self._liveness.end(self.exit_ref)

    def _create(self) -> Any:
        is_concurrent = _is_concurrent(self._role)
        host = ray.remote(concurrency_groups={"watched": 1})(RoleActor).options(
            name=self._address["actor"],
            namespace=NAMESPACE,
            num_cpus=0,
            scheduling_strategy=scheduling_strategy(self._number),
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


def scheduling_strategy(number: int) -> Any:
    """Returns Ray's scheduling strategy for an actor: actors go to the nodes in turn.

    Without it, Ray often puts all actors on one node, as they need no CPUs. If the node has left,
    or Ray does not know it yet, Ray selects another.

    Args:
        number: the index of the actor in its engine.
    """
    nodes = nodes_for_actors(ray.nodes())
    if not nodes:
        return "SPREAD"
    return NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=True)
