"""The engine of given addresses: each actor runs under a node agent that was started there."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from mirror.server.engine.actor_process import check_started, receive_message, send_message
from mirror.server.engine.channels import Channel, set_socket_options
from mirror.server.engine.engine_types import (
    ActorDied,
    Address,
    BaseEngine,
    Header,
    Liveness,
    WireError,
    run_in_threads,
)
from mirror.server.engine.handshake import ACTOR_SECONDS, agent_credentials, authenticate
from mirror.server.engine.socket_client import SocketClient, register_key

_DEATH_NOTICE_SECONDS = 1.0
_RETRY_SECONDS = 0.2
_KILL_SECONDS = 15.0
_START_SECONDS = 1260.0  # a fork and a role's constructor have 600 each
_WARNING_SECONDS = 10.0  # a wait for an agent that takes longer is logged

_Answers = queue.SimpleQueue["dict[str, Any] | None"]

_logger = logging.getLogger("mirror")


class AgentEngine(BaseEngine["AgentActor"]):
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


class AgentActor(SocketClient):
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

    @property
    def alive(self) -> bool:
        """See ``Actor``."""
        return self._liveness.is_alive

    def on_death(self, callback: Callable[[], None]) -> None:
        """See ``Actor``."""
        self._liveness.on_death(callback)

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
        """Ends the actor; it cannot be restarted."""
        self._liveness.closed.set()
        lifeline = self._lifeline
        if lifeline is not None:
            with contextlib.suppress(OSError):
                lifeline.shutdown(socket.SHUT_RDWR)
        self.disconnect(ActorDied(self.name))
        self._liveness.end(self._pid)

    def confirm_death(self) -> None:
        """Waits until the agent has reported the end that a connection noticed."""
        self._liveness.wait(_DEATH_NOTICE_SECONDS)

    def end_stalled(self) -> None:
        """See ``SocketClient``."""
        self.kill()

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
