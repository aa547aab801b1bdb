"""Node agents, and the engine that uses them: each serves one address, and runs an actor there.

::

    owner     {"start": {"name": ..., "role": ..., "init": ..., "id": ...}}
    agent     {"ready": 4711}, or {"failed": ..., "pickle": ...}, or {"died": "..."}
    owner     {"kill": 4711}
    agent     {"ended": 4711}

A free agent listens. A program that proves that it has the key owns the agent until that
connection, the lifeline, closes. Meanwhile the actor listens at the same address, in a process of
its own. When the lifeline closes, the actor ends and the agent is free again, for another program.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from time import monotonic
from typing import Any

from mirror.errors import ListenError
from mirror.server.engine.actor_process import (
    check_started,
    failure_message,
    receive_message,
    send_message,
)
from mirror.server.engine.channels import Channel, set_socket_options
from mirror.server.engine.engine_types import (
    ActorDied,
    Address,
    Engine,
    Header,
    Liveness,
    OwnedActor,
    RemoteError,
    WireError,
    run_in_threads,
)
from mirror.server.engine.fork_server import fork_server
from mirror.server.engine.handshake import (
    ACTOR_SECONDS,
    Listener,
    agent_credentials,
    authenticate,
    bind,
    listen,
    unlisten,
)
from mirror.server.engine.process_engine import ProcessActor
from mirror.server.engine.socket_client import SocketClient, register_key

_CLOSE_SECONDS = 15.0
_SEND_SECONDS = 60.0


class NodeAgent:
    """Serves programs that have the key, one after another, until it is closed.

    Args:
        port: 0 takes any free port.
        roles: the roles that a program may start.

    Raises:
        ListenError: the process cannot listen at the address, since another one does, for example.
    """

    def __init__(self, host: str, port: int, key: bytes, roles: Collection[str]) -> None:
        self._host, self._key, self._roles = host, key, frozenset(roles)
        self._sock = _listen_at(host, port)
        self.port: int = self._sock.getsockname()[1]
        self._listener: Listener | None = None
        self._owner: Channel | None = None
        self._error: BaseException | None = None
        self._closing = threading.Event()
        fork_server()  # starts to import torch
        self._thread = threading.Thread(target=self._serve, name="node agent", daemon=True)
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Waits until the agent is closed, for ``timeout`` seconds at most.

        Raises:
            BaseException: the error for which the agent has stopped serving.
        """
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the actor, and accepts no other program."""
        self._closing.set()
        listener, owner = self._listener, self._owner
        if listener is not None:
            listener.stop()
        if owner is not None:
            with contextlib.suppress(OSError):
                owner.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CLOSE_SECONDS)
        self._sock.close()

    def _serve(self) -> None:
        try:
            while (owner := self._accept_owner()) is not None:
                self._owner = owner
                try:
                    if not self._closing.is_set():
                        self._serve_owner(owner)
                except Exception as error:  # a program's message ends only its own connection
                    print(f"mirror: closed a connection: {error!r}", file=sys.stderr, flush=True)
                finally:
                    owner.close()
                if self._closing.is_set():
                    return
                listen(self._sock)
        except BaseException as error:
            self._error = error
        finally:
            unlisten(self._sock)

    def _accept_owner(self) -> Channel | None:
        """Returns the connection of the next program with the key; None after ``close``."""
        owners: list[Channel] = []

        def deliver(channel: Channel) -> None:
            owners.append(channel)
            listener.stop()

        listener = self._listener = Listener(self._sock, agent_credentials(self._key), deliver)
        if self._closing.is_set():
            listener.stop()
        listener.run()
        for other in owners[1:]:
            other.close()
        return owners[0] if owners else None

    def _serve_owner(self, owner: Channel) -> None:
        """Starts and kills the actor as the owner asks, until the owner ends; then stops it."""
        actor: ProcessActor | None = None
        sending = threading.Lock()

        def send(message: dict[str, Any]) -> None:
            with sending, contextlib.suppress(OSError):  # the loop below notices the owner's end
                send_message(owner, message, _SEND_SECONDS)

        try:
            while (message := receive_message(owner)) is not None:
                if "start" in message:
                    if actor is not None:
                        actor.stop()
                        actor = None
                    start = message["start"]
                    if start["role"] not in self._roles:
                        error = WireError(f"a role is one of {sorted(self._roles)}")
                        send(failure_message(error))
                        continue
                    actor = self._make_actor(start)
                    send(_start(actor, send))
                elif actor is not None:
                    actor.kill()
        finally:
            if actor is not None:
                actor.stop()

    def _make_actor(self, start: dict[str, Any]) -> ProcessActor:
        address = {
            "engine": "process",
            "id": start["id"],
            "name": start["name"],
            "host": self._host,
            "port": self.port,
            "tls": True,
        }
        register_key(start["id"], self._key)
        config = {"key": self._key.hex(), "role": start["role"], "init": start["init"]}
        return ProcessActor(address, self._sock.dup(), config)


def _start(actor: ProcessActor, send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    actor.on_death(lambda: send({"ended": actor.pid}))
    try:
        actor.restart()
    except RemoteError as error:
        return failure_message(error)
    except (ActorDied, OSError) as error:
        return {"died": str(error)}
    return {"ready": actor.pid}


_REMEDIES = {
    errno.EADDRINUSE: "end the process that listens there, or serve at another port",
    errno.EACCES: "ports below 1024 need privileges; serve at another port",
}
_OTHER_MACHINE = (
    "serve at an address of this machine, or listen on all networks with host='0.0.0.0' "
    "(--host 0.0.0.0)"
)


def _listen_at(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address; raises ListenError if that cannot be."""
    try:
        sock = bind(host, port)
        listen(sock)
    except (OSError, UnicodeError) as error:  # the encoding of host names
        number: Any = getattr(error, "errno", None)
        remedy = _REMEDIES.get(number, _OTHER_MACHINE)
        reason = getattr(error, "strerror", None) or error
        raised = ListenError(f"cannot listen at {host}:{port}: {reason}; {remedy}")
        raised.errno = number
        raise raised from error
    return sock


_RETRY_SECONDS = 0.2
_KILL_SECONDS = 15.0
_START_SECONDS = 1260.0  # a fork and a role's constructor have 600 each
_WARNING_SECONDS = 10.0  # a wait for an agent that takes longer is logged

_Answers = queue.SimpleQueue["dict[str, Any] | None"]

_logger = logging.getLogger("mirror")


class AgentEngine(Engine["AgentActor"]):
    """Starts each actor under the ``NodeAgent`` at the actor's address.

    Args:
        addresses: host and port by the actor's name.
        key: the key of the node agents.
        timeout_seconds: how long an agent may be unreachable, or busy with another program.
    """

    def __init__(
        self,
        addresses: Mapping[str, tuple[str, int]],
        key: bytes,
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__()
        self.id = secrets.token_hex(8)
        self._addresses, self._timeout = dict(addresses), timeout_seconds
        self._stop_all = weakref.finalize(self, _stop_all, self._actors)
        register_key(self.id, key)

    def _make(self, name: str, role: str, init: Header) -> AgentActor:
        if name not in self._addresses:
            raise WireError(
                f"there is no address for {name}; there are {', '.join(self._addresses)}"
            )
        host, port = self._addresses[name]
        address: Address = {"engine": "process", "id": self.id, "name": name}
        address |= {"host": host, "port": port, "tls": True}
        return AgentActor(address, {"role": role, "init": init}, self._timeout)

    def close(self) -> None:
        """See ``Engine``; afterwards the agents serve other programs."""
        self._is_closed = True
        self._stop_all()


def _stop_all(actors: list[AgentActor]) -> None:
    for actor in actors:
        actor.stop()
    actors.clear()


class AgentActor(OwnedActor, SocketClient):
    """An actor under a node agent, as the program that started it sees it.

    One thread receives the agent's messages. It puts the answers to ``restart`` into a queue, and
    records the ends of the actor's processes.
    """

    def __init__(self, address: Address, start: dict[str, Any], timeout_seconds: float) -> None:
        super().__init__(address)
        self._agent_address = address["host"], address["port"]
        self._timeout = timeout_seconds
        self._start = {"name": self.name, "id": address["id"], **start}
        self._lifeline: Channel | None = None
        self._answers: _Answers = queue.SimpleQueue()  # of this lifeline
        self._lock = threading.RLock()
        self._liveness = Liveness()
        self._pid_lock = threading.Lock()
        self._pid = self._ended_pid = 0

    def kill(self) -> None:
        """See ``Actor``."""
        lifeline = self._lifeline
        if self.alive and lifeline is not None:
            with contextlib.suppress(OSError):  # the agent has ended, and its actor with it
                send_message(lifeline, {"kill": self._pid}, _KILL_SECONDS)
            self._liveness.wait(_KILL_SECONDS)
            if self.alive:  # the agent does not answer; it ends the actor when it reads this
                with contextlib.suppress(OSError):
                    lifeline.shutdown(socket.SHUT_RDWR)
                self._record_end(self._pid)

    def restart(self) -> None:
        """See ``Actor``; waits until an agent at the address is free."""
        with self._lock:
            self.kill()
            self.disconnect(ActorDied(self.name))
            deadline = monotonic() + self._timeout
            answer = None
            while answer is None:
                self._liveness.check_open(self.name)
                answer = self._request_start(deadline)
            check_started(answer)
            if "died" in answer:
                raise ActorDied(self.name, answer["died"].removeprefix(f"{self.name}: "))
            with self._pid_lock:
                self._pid = answer["ready"]
                self._liveness.begin(self._pid)
                has_ended = self._pid == self._ended_pid or self._lifeline is None
            if has_ended:
                self._record_end(self._pid)

    def stop(self) -> None:
        """See ``Actor``."""
        self._liveness.closed.set()
        lifeline = self._lifeline
        if lifeline is not None:
            with contextlib.suppress(OSError):
                lifeline.shutdown(socket.SHUT_RDWR)
        self.disconnect(ActorDied(self.name))
        self._liveness.end(self._pid)

    def _request_start(self, deadline: float) -> dict[str, Any] | None:
        """Asks the agent to start the actor; returns None if the agent ends meanwhile."""
        lifeline = self._lifeline
        if lifeline is None:
            self._lifeline = lifeline = self._connect_to_agent(deadline)
            self._answers = queue.SimpleQueue()
            args = [lifeline, self._answers]
            threading.Thread(target=self._receive, args=args, name=self.name, daemon=True).start()
        self._ended_pid = 0
        with contextlib.suppress(OSError):  # the receiving thread notices it as well
            send_message(lifeline, {"start": self._start}, _KILL_SECONDS)
        try:
            return self._answers.get(timeout=max(self._timeout, _START_SECONDS))
        except queue.Empty:
            with contextlib.suppress(OSError):
                lifeline.shutdown(socket.SHUT_RDWR)
            raise ActorDied(self.name, "its agent did not answer") from None

    def _connect_to_agent(self, deadline: float) -> Channel:
        """Connects to the agent, as soon as it is there and free."""
        start, has_warned = monotonic(), False
        where = f"{self._agent_address[0]}:{self._agent_address[1]}"
        while True:
            try:
                sock = socket.create_connection(self._agent_address, timeout=ACTOR_SECONDS)
                set_socket_options(sock)
                return authenticate(sock, agent_credentials(self._key))
            except WireError as error:
                raise WireError(f"{self.name} at {where}: {error}") from None
            except (EOFError, OSError) as error:
                reason = error
            if monotonic() >= deadline:
                raise ActorDied(
                    self.name,
                    f"no free server process at {where} ({reason}); start one there, with the "
                    f"same MIRROR_ENGINE_KEY: mirror serve {where}",
                )
            if not has_warned and monotonic() > start + _WARNING_SECONDS:
                _logger.warning(
                    "waiting for %s: no free server process at %s (%s)", self.name, where, reason
                )
                has_warned = True
            if self._liveness.closed.wait(_RETRY_SECONDS):
                self._liveness.check_open(self.name)

    def _receive(self, lifeline: Channel, answers: _Answers) -> None:
        while (message := receive_message(lifeline)) is not None:
            if "ended" in message:
                self._record_end(message["ended"])
            else:
                answers.put(message)
        self._lifeline = None
        lifeline.close()
        self._record_end(self._pid)
        answers.put(None)

    def _record_end(self, pid: int) -> None:
        with self._pid_lock:
            self._ended_pid = pid
            callbacks = self._liveness.end(pid)
        if not self.alive:
            self.disconnect(ActorDied(self.name))
        run_in_threads(callbacks)
