"""Clients of a Ray actor, in any process of its cluster, and the class that Ray runs in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from mirror.errors import first_line
from mirror.server.engine.connection import decode_error
from mirror.server.engine.engine_types import (
    ActorDied,
    Address,
    Answer,
    Array,
    Header,
    Sendable,
    WireError,
)
from mirror.server.engine.frames import as_array
from mirror.server.engine.service_loop import (
    encode_error,
    encode_result,
    method_of,
    resolve_role,
)

NAMESPACE = "mirror"

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


class RayFuture:
    """The future of a call to a Ray actor."""

    def __init__(self, client: RayClient, ref: Any, into: Sequence[Array] | None) -> None:
        self._client, self._ref, self._into = client, ref, into
        self._answer: Answer | None = None
        self._error: Exception | None = None

    def result(self, timeout: float | None = None) -> Answer:
        """See ``Future``."""
        if self._answer is None and self._error is None:
            self._get(timeout)
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def done(self) -> bool:
        """See ``Future``."""
        return self._ref is None or bool(ray.wait([self._ref], timeout=0)[0])

    def fail(self, error: Exception) -> RayFuture:
        """Stores the reason why no answer will come."""
        self._error, self._ref = error, None
        return self

    def _get(self, timeout: float | None) -> None:
        seconds = self._client.timeout_seconds if timeout is None else timeout
        try:
            kind, header, buffers = ray.get(self._ref, timeout=seconds)
            if kind == "refs":
                buffers = ray.get(buffers, timeout=seconds)
        except GetTimeoutError:
            late = f"{self._client.name} has not answered within {seconds:g} s"
            if timeout is not None:
                raise TimeoutError(late) from None
            self._client.end_stalled()
            self.fail(
                ActorDied(self._client.name, f"{late}, the limit for a call (timeout_seconds)")
            )
            return
        except RayActorError as error:
            self._client.forget()
            self.fail(ActorDied(self._client.name, f"its process has ended ({first_line(error)})"))
            return
        if kind == "raised":
            self.fail(decode_error(header, buffers))
        else:
            self._answer = header, self._copy_into(buffers)
        self._ref = None

    def _copy_into(self, buffers: list[Array]) -> list[Array]:
        into = self._into
        if into is None or [(a.dtype, a.shape) for a in into] != [
            (b.dtype, b.shape) for b in buffers
        ]:
            return buffers
        for array, buffer in zip(into, buffers, strict=True):
            np.copyto(array, buffer)
        return list(into)


class RayClient:
    """Calls a Ray actor, which it finds by the actor's name."""

    def __init__(self, address: Address, timeout_seconds: float | None = None) -> None:
        self.name: str = address["name"]
        self.timeout_seconds = timeout_seconds
        self._address = dict(address)
        self._handle: Any = None

    @property
    def address(self) -> Address:
        """See ``ActorClient``."""
        return dict(self._address)

    def call(
        self,
        method: str,
        header: Header | None = None,
        buffers: Sequence[Sendable] = (),
        *,
        into: Sequence[Array] | None = None,
    ) -> RayFuture:
        """See ``ActorClient``."""
        header = as_json(header or {})
        arrays = [as_array(buffer) for buffer in buffers]
        future = RayFuture(self, None, into)
        try:
            handle = self._find()
            ref = handle.answer.remote(method, header, *arrays)
        except (RayActorError, ValueError) as error:
            self.forget()
            return future.fail(
                ActorDied(self.name, f"Ray has no such actor ({first_line(error)})")
            )
        return RayFuture(self, ref, into)

    def close(self) -> None:
        """See ``ActorClient``."""
        self._handle = None

    def forget(self) -> None:
        """Forgets the actor, which has ended; the next call looks for a restarted one."""
        self._handle = None

    def end_stalled(self) -> None:
        """Is called when a call has taken ``timeout_seconds``; an owner kills the process."""

    def _find(self) -> Any:
        if self._handle is None:
            self._handle = ray.get_actor(self._address["actor"], namespace=NAMESPACE)
        return self._handle
