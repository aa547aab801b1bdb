"""What Ray runs: an object of a role, whose methods are called by name."""

from __future__ import annotations

import json
import threading
from typing import Any

import ray

from mirror.server.engine.actor_process import role as role_of
from mirror.server.engine.engine_types import Array, Header, WireError
from mirror.server.engine.frames import as_array
from mirror.server.engine.service_loop import encode_error, encode_result, method_of

ONCE = "once"
LARGE = 64 << 10
"""From how many bytes on buffers are put where others find them; fewer come with the answer."""


class RoleActor:
    """What Ray runs: an object of a role."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._target: Any = None
        self._put: dict[str, tuple[Any, list[Any]]] = {}

    def __repr__(self) -> str:
        return self._name  # which is what Ray writes before each line that it prints

    def make(self, role: str, init: Header) -> tuple[str, Header, list[Any]]:
        """Makes the object."""
        try:
            self._target = role_of(role)(**init)
        except BaseException as error:
            return ("raised", *encode_error(error))
        return "answer", {}, []

    def answer(self, method: str, header: Header, *buffers: Any) -> tuple[str, Header, list[Any]]:
        """Calls a method; returns what came of it, and whether these are refs of the buffers."""
        try:
            found, arrays = encode_result(method_of(self._target, method)(header, list(buffers)))
            found = as_json(found)
            sent: list[Array] = [as_array(buffer) for buffer in arrays]
        except BaseException as error:
            return ("raised", *encode_error(error))
        if ONCE not in found or sum(array.nbytes for array in sent) < LARGE:
            return "answer", found, sent
        known = self._put.get(method)
        if known is None or known[0] != found[ONCE]:
            known = self._put[method] = found[ONCE], [ray.put(array) for array in sent]
        return "refs", found, known[1]

    def block_forever(self) -> None:
        """Never returns: who waits for it hears when the process has ended."""
        threading.Event().wait()


def as_json(header: Header) -> Header:
    """Returns a header as it is after a way as JSON.

    Raises:
        WireError: it is none.
    """
    try:
        found: Header = json.loads(json.dumps(header))
    except (TypeError, ValueError) as error:
        raise WireError(f"a header is JSON: {error}; send data as buffers") from None
    return found
