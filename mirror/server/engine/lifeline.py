"""Messages over a lifeline, the connection that keeps an actor alive.

A lifeline is a pair of sockets between an actor, or a node agent, and its owner: the process that
started the actor. The configuration goes over it, and the actor's readiness comes back. When one
side ends, the kernel closes the socket, and the other side reads the end of the stream. A message
is JSON with its length in front.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from mirror.server.engine.connection import decode_error
from mirror.server.engine.engine_types import RemoteError
from mirror.server.engine.service_loop import encode_error

_LENGTH = struct.Struct("<I")


def send_message(sock: socket.socket, content: dict[str, Any]) -> None:
    """Sends a message; raises OSError if the other side has ended."""
    text = json.dumps(content).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text)


def receive_message(sock: socket.socket) -> dict[str, Any] | None:
    """Returns the next message, or None if the other side has ended."""
    head = _receive_bytes(sock, _LENGTH.size)
    text = None if head is None else _receive_bytes(sock, _LENGTH.unpack(head)[0])
    content: dict[str, Any] | None = None if text is None else json.loads(text)
    return content


def _receive_bytes(sock: socket.socket, size: int) -> bytes | None:
    received = b""
    while len(received) < size:
        try:
            more = sock.recv(size - len(received))
        except OSError:
            return None
        if not more:
            return None
        received += more
    return received


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
