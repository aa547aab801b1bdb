"""The process of an actor, from its fork until it exits, and its lifeline.

The process reads its configuration from its lifeline, constructs the role, reports that it is
ready, and serves calls. It exits when its lifeline closes.

A lifeline is a pair of sockets between an actor, or a node agent, and its owner: the process that
started the actor. When one side ends, the kernel closes the socket, and the other side reads the
end of the stream. A message is JSON with its length in front.
"""

from __future__ import annotations

import functools
import json
import os
import random
import select
import socket
import struct
import sys
import threading
import types
from multiprocessing import spawn
from typing import Any

import numpy as np

from mirror.server.engine.channels import Channel, wait_for
from mirror.server.engine.connection import decode_error
from mirror.server.engine.engine_types import RemoteError
from mirror.server.engine.handshake import actor_credentials
from mirror.server.engine.service_loop import (
    ServiceLoop,
    encode_error,
    exit_now,
    resolve_role,
    start_vital_thread,
)
from mirror.server.engine.socket_client import register_key


def run_actor(lifeline: socket.socket, port: socket.socket) -> None:
    """Runs an actor in a process that was just forked, until its lifeline closes.

    Args:
        port: a listening socket; the actor accepts its clients there.
    """
    config = receive_message(lifeline)
    if config is None:
        return
    try:
        _prepare(config)
        target = resolve_role(config["role"])(**config["init"])
        credentials = actor_credentials(bytes.fromhex(config["key"]), config["address"])
        service = ServiceLoop(target, port, credentials)
    except BaseException as error:
        send_message(lifeline, failure_message(error))
        return
    start_vital_thread(functools.partial(_exit_on_eof, lifeline), "lifeline")
    send_message(lifeline, {"ready": True})
    service.run()


def _exit_on_eof(lifeline: socket.socket) -> None:
    receive_message(lifeline)
    exit_now(0)


def _prepare(config: dict[str, Any]) -> None:
    """Sets the process up as ``multiprocessing`` sets up one that it spawns."""
    register_key(config["address"]["id"], bytes.fromhex(config["key"]))
    os.environ.clear()
    os.environ.update(config["environ"])
    prepared = dict(config["prepared"])
    main = {key: prepared.pop(key) for key in tuple(prepared) if key.startswith("init_main")}
    spawn.prepare(prepared)
    # Every fork has the random states of the fork server, which are the same for all actors.
    random.seed()
    np.random.seed()
    sys.modules["__main__"] = _LazyMain(main)


class _LazyMain(types.ModuleType):
    """The owner's ``__main__``, which is run when one of its names is looked up.

    So a script needs its ``if __name__ == "__main__"`` only if an actor uses what it defines.
    """

    def __init__(self, prepared: dict[str, Any]) -> None:
        super().__init__("__main__")
        self._prepared, self._lock = prepared, threading.RLock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_prepared", "_lock"):
            raise AttributeError(name)
        with self._lock:
            prepared, self._prepared = self._prepared, {}
            if prepared:
                sys.modules["__main__"] = types.ModuleType("__main__")
                spawn.prepare(prepared)  # replaces the entry of sys.modules by the owner's module
                self.__dict__.update(vars(sys.modules["__main__"]))
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module '__main__' has no attribute {name!r}") from None


_LENGTH = struct.Struct("<I")
_MAX_BYTES = 64 << 20
_PIECE_BYTES = 1 << 16


def send_message(channel: Channel, content: dict[str, Any], seconds: float | None = None) -> None:
    """Sends a message.

    Raises:
        OSError: the other side has ended, or did not read within ``seconds``.
    """
    text = json.dumps(content).encode()
    rest = memoryview(_LENGTH.pack(len(text)) + text)
    while rest.nbytes:
        try:
            rest = rest[channel.sendmsg([rest]) :]
        except BlockingIOError:
            wait_for(channel, select.POLLOUT, seconds)


def receive_message(channel: Channel, seconds: float | None = None) -> dict[str, Any] | None:
    """Returns the next message, or None if the other side has ended.

    Raises:
        TimeoutError: nothing came for ``seconds``, if the channel does not block.
    """
    head = _receive_bytes(channel, _LENGTH.size, seconds)
    if head is None:
        return None
    size = _LENGTH.unpack(head)[0]
    text = _receive_bytes(channel, size, seconds) if size <= _MAX_BYTES else None
    try:
        content = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _receive_bytes(channel: Channel, size: int, seconds: float | None) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        piece = memoryview(bytearray(min(size - len(received), _PIECE_BYTES)))
        try:
            count = channel.recv_into(piece)
        except BlockingIOError:
            wait_for(channel, select.POLLIN, seconds)
            continue
        except OSError:
            return None
        if not count:
            return None
        received += piece[:count]
    return bytes(received)


def failure_message(error: BaseException) -> dict[str, Any]:
    """Returns the message that an actor's constructor raised an error."""
    if isinstance(error, RemoteError):  # a node agent forwards what the actor's process sent
        content = {
            "type": error.type_name,
            "message": error.message,
            "traceback": error.traceback,
        }
        pickled = [] if error.original is None else encode_error(error.original)[1]
    else:
        content, pickled = encode_error(error)
    return {"failed": content, "pickle": [data.hex() for data in pickled]}


def check_started(message: dict[str, Any]) -> None:
    """Raises RemoteError if a message says that the actor's constructor raised."""
    if "failed" in message:
        raise decode_error(message["failed"], [bytes.fromhex(t) for t in message["pickle"]])
