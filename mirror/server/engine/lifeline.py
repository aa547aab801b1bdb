"""Messages over a lifeline, the connection that keeps an actor alive.

A lifeline is a pair of sockets between an actor, or a node agent, and its owner: the process that
started the actor. The configuration goes over it, and the actor's readiness comes back. When one
side ends, the kernel closes the socket, and the other side reads the end of the stream. A message
is JSON with its length in front.
"""

from __future__ import annotations

import json
import select
import struct
from typing import Any

from mirror.server.engine.channels import Channel, wait_for
from mirror.server.engine.connection import decode_error
from mirror.server.engine.engine_types import RemoteError
from mirror.server.engine.service_loop import encode_error

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
