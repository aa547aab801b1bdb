"""The scope of strategies that mirror nothing: one is current in it, and what is made is noted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from types import TracebackType
from typing import Any

from mirror.execution.current_replica import Context, current, push_context, save_context
from mirror.server.recorded_model import RecordedModules
from mirror.strategy.scope import refuse_inside_another


class PlacingScope(ContextDecorator):
    """What ``scope()`` of such a strategy returns: ``with`` enters it.

    Args:
        recorded: notes the modules that are made.
        check_usable: raises StrategyError where the strategy is closed; told what asks.
    """

    def __init__(
        self, strategy: Any, recorded: RecordedModules, check_usable: Callable[[str], None]
    ) -> None:
        self._strategy, self._recorded, self._check_usable = strategy, recorded, check_usable
        self._before: list[tuple[Context, ExitStack]] = []

    def __enter__(self) -> None:
        self._check_usable("scope")
        refuse_inside_another(self._strategy)
        before, stack = save_context(), ExitStack()
        try:
            self._before.append((before, stack))
            push_context(self._strategy, None)
            stack.enter_context(self._recorded.recording())
        except BaseException:
            current.replica, current.strategy, current.below = before
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        before, stack = self._before.pop()
        try:
            stack.close()
        finally:
            current.replica, current.strategy, current.below = before
