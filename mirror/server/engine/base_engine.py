"""Starting: what engines have in common, whatever their actors are."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from mirror.server.engine.engine_types import Header, WireError

if TYPE_CHECKING:
    from typing_extensions import Self


class Startable(Protocol):
    """An actor that does not stand yet."""

    def restart(self) -> None:
        """See ``Actor``."""

    def end(self) -> None:
        """Ends it for good."""


StartableT = TypeVar("StartableT", bound=Startable)


class BaseEngine(ABC, Generic[StartableT]):
    """An engine that knows the actors which it has started."""

    def __init__(self) -> None:
        self._actors: list[StartableT] = []
        self._is_closed = False

    @abstractmethod
    def _make(self, name: str, role: str, init: Header) -> StartableT:
        """Returns an actor that is yet to stand."""

    @abstractmethod
    def close(self) -> None:
        """See ``Engine``."""

    def start(self, name: str, role: str, init: Header) -> StartableT:
        """See ``Engine``."""
        if self._is_closed:
            raise WireError("this engine is closed; make another")
        actor = self._make(name, role, init)
        self._actors.append(actor)
        try:
            actor.restart()
        except BaseException:
            with contextlib.suppress(ValueError):  # closed meanwhile
                self._actors.remove(actor)
            actor.end()
            raise
        return actor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
