"""SignedStore: values in a store that anyone can write to; with a key, each value has a MAC.

A value is ``MAC payload``; the MAC is the HMAC-SHA256 of the session, the key's name and the
payload, under the cluster's key (RFC 2104). The session is a random number that the coordinator
draws at its start: a value of an earlier training at the same address is not valid in this one.
Within a session an old value of the same name is valid; readers must ignore what is older than
what they know. Without a key the MAC is empty, and values are checked for their form only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from mirror.errors import ClusterError

T = TypeVar("T")

_log = logging.getLogger("mirror")
_SESSION = "session"


class SignedStore:
    """Reads and writes signed values; reports a value that is not valid once per name.

    Args:
        key: the key that all processes of the training have; None signs nothing.
    """

    def __init__(self, store: Store, key: bytes | None) -> None:
        self._store, self._key = store, key
        self._session = ""
        self._reported: set[str] = set()

    def begin(self) -> None:
        """Begins a session; only the coordinator calls it, before others read or write."""
        session = secrets.token_hex(16)
        self._session = ""
        self.write(_SESSION, session)
        self._session = session

    def join(self) -> None:
        """Takes part in the coordinator's session.

        Raises:
            ClusterError: the coordinator has another key, or only one of the two has a key.
        """
        self._session = ""
        session = self.read(_SESSION, str, wait=True)
        if session is None:
            raise ClusterError(
                "the coordinator of the elastic training has another key, or none; set the same "
                "MIRROR_ENGINE_KEY in all processes of the training, or in none"
            )
        self._session = session

    def write(self, name: str, payload: str) -> None:
        """Writes a value."""
        self._store.set(name, f"{self._mac(name, payload)} {payload}")

    def read(self, name: str, parse: Callable[[str], T], *, wait: bool = False) -> T | None:
        """Returns a parsed value; None if there is none, or it is not valid.

        Args:
            parse: raises ValueError for a payload that no process of the training writes.
            wait: whether to wait until there is one.
        """
        if not wait and not self._store.check([name]):
            return None
        return self._open(name, self._store.get(name), parse)

    def read_all(self, names: Sequence[str], parse: Callable[[str], T]) -> list[T | None]:
        """Returns the values of names that exist; None for each that is not valid."""
        values = self._store.multi_get(list(names)) if names else []
        return [self._open(name, value, parse) for name, value in zip(names, values, strict=True)]

    def _mac(self, name: str, payload: str) -> str:
        if self._key is None:
            return ""
        message = "\0".join(("mirror elastic", self._session, name, payload))
        return hmac.new(self._key, message.encode(), hashlib.sha256).hexdigest()

    def _open(self, name: str, value: bytes, parse: Callable[[str], T]) -> T | None:
        try:
            mac, _, payload = value.decode().partition(" ")
            if not hmac.compare_digest(mac.encode(), self._mac(name, payload).encode()):
                raise ValueError("it was written without this training's key")
            return parse(payload)
        except (ValueError, RecursionError) as error:
            if name not in self._reported:
                self._reported.add(name)
                _log.warning("%r in the store of the elastic training is ignored: %s", name, error)
            return None
