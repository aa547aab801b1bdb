"""The class that Ray runs in an actor's process: it calls a role's methods by name."""

from __future__ import annotations

import json
import threading
from typing import Any

import ray

from mirror.server.engine.engine_types import Array, Header, WireError
from mirror.server.engine.frames import as_array
from mirror.server.engine.service_loop import (
    encode_error,
    encode_result,
    method_of,
    resolve_role,
)

ONCE = "once"
"""Key of a header: equal values mean equal buffers, so that Ray stores them only once."""
LARGE = 64 << 10
"""Buffers of this many bytes and more are put into the object store; others go in the answer."""


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
