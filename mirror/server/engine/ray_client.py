"""Clients of a Ray actor, in any process of its cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from mirror.server.engine.connection import decode_error
from mirror.server.engine.engine_types import ActorDied, Address, Answer, Array, Header, Sendable
from mirror.server.engine.frames import as_array
from mirror.server.engine.ray_actor import as_json
from mirror.server.engine.ray_init import NAMESPACE


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
            self._answer = header, self._into_arrays(buffers)
        self._ref = None

    def _into_arrays(self, buffers: list[Array]) -> list[Array]:
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


def first_line(error: Exception) -> str:
    """Returns the first line of an error of Ray; the others are a report."""
    return str(error).strip().partition("\n")[0]
