"""The engine "process": actors are processes on this machine.

``make_engine`` selects an engine, and ``connect_actor`` a client.

An actor must not outlive the process that started it, not even if SIGKILL ended that process.
Three mechanisms see to that. The kernel closes the owner's end of the lifeline, and the actor
exits. The fork server exits when its connection to the owner closes, or when it has another
parent. The kernel kills the actors when the fork server ends. So no process is left, even if
something was forked in between and keeps descriptors open.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import weakref
from multiprocessing import spawn
from typing import Any

from mirror.device.host import status_of_process
from mirror.errors import BackendError
from mirror.server.engine.actor_process import check_started, receive_message, send_message
from mirror.server.engine.engine_types import (
    ActorClient,
    ActorDied,
    Address,
    Engine,
    Header,
    Liveness,
    OwnedActor,
    WireError,
    run_in_threads,
)
from mirror.server.engine.fork_server import ForkedProcess, fork_server
from mirror.server.engine.handshake import bind, listen, new_key, unlisten
from mirror.server.engine.socket_client import (
    SocketClient,
    environment_without_key,
    register_key,
)

NAMES = ("auto", "process", "ray")


def make_engine(name: str = "auto") -> Engine[Any]:
    """Returns a new engine.

    Args:
        name: "process" starts processes on this machine. "ray" starts Ray actors, on the cluster
            that the program is connected to, or on this machine if it is connected to none.
            "auto" is "ray" if the program called ``ray.init`` or a Ray job started it, and
            "process" otherwise.

    Raises:
        BackendError: no engine has this name, or a package that it needs is not installed.
    """
    if name not in NAMES:
        raise BackendError(f"an engine is one of {', '.join(NAMES)}; got {name!r}")
    if name == "ray" or (name == "auto" and _uses_ray()):
        from mirror.server.engine.ray_engine import RayEngine  # imports Ray

        return RayEngine()
    return ProcessEngine()


def connect_actor(address: Address, timeout_seconds: float | None = None) -> ActorClient:
    """Returns a client of an actor, which connects at the first call.

    Args:
        address: the ``address`` of an actor or a client.
        timeout_seconds: the limit for a call, after which the actor counts as lost.

    Raises:
        WireError: the argument is not an address, or this process does not have the key.
    """
    engine = address.get("engine") if isinstance(address, dict) else None
    if engine == "ray":
        from mirror.server.engine.ray_engine import RayClient  # imports Ray

        return RayClient(address, timeout_seconds)
    if engine != "process":
        raise WireError(f"an address is the value of actor.address; got {address!r}")
    return SocketClient(address, timeout_seconds)


def _uses_ray() -> bool:
    if "RAY_ADDRESS" in os.environ:
        return True
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", lambda: False)())


_START_SECONDS = 600.0
# The states of proc(5).
_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk",
    "Z": "has ended",
    "X": "has ended",
}
_SPAWN_KEYS = (
    "sys_path",
    "sys_argv",
    "dir",
    "orig_dir",
    "init_main_from_name",
    "init_main_from_path",
)


class ProcessEngine(Engine["ProcessActor"]):
    """Starts actors as processes on this machine, which only this machine can connect to."""

    def __init__(self) -> None:
        super().__init__()
        self.id = secrets.token_hex(8)
        self._key = new_key()
        self._stop_all = weakref.finalize(self, _stop_all, self._actors)
        register_key(self.id, self._key)
        fork_server()  # starts to import torch

    def _make(self, name: str, role: str, init: Header) -> ProcessActor:
        port = bind("127.0.0.1", 0)
        address = {
            "engine": "process",
            "id": self.id,
            "name": name,
            "host": "127.0.0.1",
            "port": port.getsockname()[1],
            "tls": False,
        }
        return ProcessActor(address, port, {"key": self._key.hex(), "role": role, "init": init})

    def close(self) -> None:
        """See ``Engine``."""
        self._is_closed = True
        self._stop_all()


def _stop_all(actors: list[ProcessActor]) -> None:
    for actor in actors:
        actor.begin_stop()
    for actor in actors:
        actor.stop()
    actors.clear()


class ProcessActor(OwnedActor, SocketClient):
    """An actor in a process of this machine, as its owner sees it.

    Args:
        port: the socket of ``bind`` at which each process of the actor accepts connections.
        config: of the actor's process, without its address.
    """

    def __init__(self, address: Address, port: socket.socket, config: dict[str, Any]) -> None:
        super().__init__(address)
        self._port = port
        self._config = {**config, "address": address}
        self._child: ForkedProcess | None = None
        self._lock = threading.RLock()
        self._liveness = Liveness()

    @property
    def pid(self) -> int:
        """The number of its process."""
        assert self._child is not None
        return self._child.pid

    def kill(self) -> None:
        """See ``Actor``."""
        if self._child is not None:
            self._child.kill()
            self._record_end(self._child)

    def restart(self) -> None:
        """See ``Actor``."""
        with self._lock:
            self._liveness.check_open(self.name)
            self.kill()
            self.disconnect(ActorDied(self.name))
            listen(self._port)
            try:
                child = fork_server().fork(self.name, self._port)
            except ActorDied:  # the fork server has ended since it was last used
                child = fork_server().fork(self.name, self._port)
            try:
                self._set_up(child)
            except BaseException:
                child.kill()
                unlisten(self._port)
                raise
            self._child = child
            self._liveness.begin(child)
        child.on_end(lambda: self._record_end(child))

    def begin_stop(self) -> None:
        """Asks the process to end, without waiting for it."""
        self._liveness.closed.set()
        if self._child is not None:
            self._child.begin_kill()

    def stop(self) -> None:
        """See ``Actor``."""
        self._liveness.closed.set()
        with self._lock:
            self.kill()
            self.disconnect(ActorDied(self.name))
            unlisten(self._port)
            self._port.close()

    def state(self) -> str:
        """See ``SocketClient``."""
        if self._child is None:
            return ""
        try:
            letter = status_of_process(self._child.pid)["State"][0]
        except FileNotFoundError:
            return f"; its process {self._child.pid} has ended"
        except OSError:
            return ""
        if self._child.ended.is_set():  # another process may have its number by now
            letter = "Z"
        return f"; its process {self._child.pid} {_STATES.get(letter, 'waits or works')}"

    def _set_up(self, child: ForkedProcess) -> None:
        prepared = spawn.get_preparation_data(self.name)
        kept = {key: prepared[key] for key in _SPAWN_KEYS if key in prepared}
        config = {**self._config, "environ": environment_without_key(), "prepared": kept}
        try:
            # A duplicate: the original is closed when the child ends, maybe before the answer
            # is read.
            with child.lifeline.dup() as lifeline:
                send_message(lifeline, config, _START_SECONDS)
                answer = receive_message(lifeline, _START_SECONDS)
        except TimeoutError:
            raise ActorDied(
                self.name, f"its constructor did not return within {_START_SECONDS:g} s"
            ) from None
        except OSError:
            answer = None
        if answer is None:
            child.ended.wait()
            raise ActorDied(self.name, f"the process exited with code {child.code} while starting")
        check_started(answer)

    def _record_end(self, child: ForkedProcess) -> None:
        run_in_threads(self._liveness.end(child))
        with self._lock:
            if child is self._child:
                unlisten(self._port)  # clients learn at once that the actor has ended
