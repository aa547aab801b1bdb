"""The process of an actor, from its fork to its end: it ends with the process that started it.

Its tether is one end of a pair of sockets whose other end that process holds: the actor's
configuration comes there, its readiness goes back, and an end of it is the actor's.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import socket
import struct
import sys
import threading
import types
from multiprocessing import spawn
from typing import Any

import numpy as np

from mirror.errors import short_repr
from mirror.server.engine.service_loop import ServiceLoop, encode_error
from mirror.server.engine.socket_client import register_key

_LENGTH = struct.Struct("<I")


def send_words(sock: socket.socket, content: dict[str, Any]) -> None:
    """Sends JSON over a tether."""
    text = json.dumps(content).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text)


def receive_words(sock: socket.socket) -> dict[str, Any] | None:
    """Returns the JSON that comes over a tether; None if the other side is gone."""
    head = _received(sock, _LENGTH.size)
    text = None if head is None else _received(sock, _LENGTH.unpack(head)[0])
    found: dict[str, Any] | None = None if text is None else json.loads(text)
    return found


def _received(sock: socket.socket, size: int) -> bytes | None:
    got = b""
    while len(got) < size:
        try:
            more = sock.recv(size - len(got))
        except ConnectionError:
            return None
        if not more:
            return None
        got += more
    return got


def run(tether: socket.socket) -> None:
    """Is an actor, in a process just forked, until its tether ends."""
    config = receive_words(tether)
    if config is None:
        return
    try:
        _prepare(config)
        target = role(config["role"])(**config["init"])
        listener = listening(config["host"], config["port"])
        service = ServiceLoop(target, listener, bytes.fromhex(config["key"]))
    except BaseException as error:
        content, pickled = encode_error(error)
        send_words(tether, {"failed": content, "pickle": [text.hex() for text in pickled]})
        return
    threading.Thread(target=_exit_on_eof, args=[tether], name="tether", daemon=True).start()
    send_words(tether, {"port": listener.getsockname()[1]})
    service.run()


def _exit_on_eof(tether: socket.socket) -> None:
    receive_words(tether)
    exit_now(0)


def exit_now(code: int) -> None:
    """Ends the process at once, once what it has printed is on its way."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that has a port, 0: any that is free, which others of ours may have, too.

    Who starts an actor holds its port, without listening, for as long as it may restart it.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens there."""
    sock = bind(host, port)
    sock.listen(128)
    return sock


def role(path: str) -> Any:
    """Returns a class by its dotted path, as ``package.module:Class``."""
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"a role is 'package.module:Class', not {short_repr(path)}")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _prepare(config: dict[str, Any]) -> None:
    """Makes the process what one started anew by ``multiprocessing`` would be."""
    register_key(config["id"], bytes.fromhex(config["key"]))
    os.environ.clear()
    os.environ.update(config["environ"])
    prepared = dict(config["prepared"])
    main = {key: prepared.pop(key) for key in tuple(prepared) if key.startswith("init_main")}
    spawn.prepare(prepared)
    # A fork has the generators of whom it was forked from, at the same place for all.
    random.seed()
    np.random.seed()
    sys.modules["__main__"] = _Main(main)


class _Main(types.ModuleType):
    """``__main__`` of whom started the actor: run when something of it is asked for.

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
                spawn.prepare(prepared)  # which puts the module where __main__ is looked up
                self.__dict__.update(vars(sys.modules["__main__"]))
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module '__main__' has no attribute {name!r}") from None
