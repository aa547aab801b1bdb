"""The process of an actor, from its fork until it exits.

The process reads its configuration from its lifeline, constructs the role, reports that it is
ready, and serves calls. It exits when its lifeline closes.
"""

from __future__ import annotations

import functools
import os
import random
import socket
import sys
import threading
import types
from multiprocessing import spawn
from typing import Any

import numpy as np

from mirror.server.engine.handshake import actor_credentials
from mirror.server.engine.lifeline import failure_message, receive_message, send_message
from mirror.server.engine.service_loop import (
    ServiceLoop,
    exit_now,
    resolve_role,
    start_vital_thread,
)
from mirror.server.engine.socket_client import register_key


def run(lifeline: socket.socket, port: socket.socket) -> None:
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
