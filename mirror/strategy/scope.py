"""Scopes of strategies: inside one, its strategy is current and records the created modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mirror.errors import StrategyError
from mirror.execution.run import Context, current, push_context, save_context
from mirror.replica.modules.module_owner import (
    MirroredModules,
    begin_recording,
    end_recording,
    recording,
)
from mirror.replica.modules.module_registry import layer_libraries
from mirror.strategy.group import Group

if TYPE_CHECKING:
    from mirror.server.recorded_model import RecordedModules


class Scope(ContextDecorator):
    """The scope of a strategy that mirrors modules; it warns if it is never entered."""

    def __init__(self, group: Group) -> None:
        self._strategy, self._group = group.replicas.strategy, group
        self._before: list[tuple[Context, tuple[MirroredModules, ...]]] = []
        self._is_used = False

    def __enter__(self) -> None:
        self._is_used = True
        self._group.runner.check_usable()
        if current.replica is not None:
            raise StrategyError(
                "scope() was entered inside run; enter it in the cross-replica context"
            )
        check_no_other_scope(self._strategy)
        before, recorders = save_context(), recording.recorders
        try:
            self._before.append((before, recorders))
            push_context(self._strategy, None)
            begin_recording(self._group.modules)
            for library in layer_libraries:
                library.watch()
        except BaseException:  # after an interrupt here, ``__exit__`` is not called
            current.replica, current.strategy, current.below = before
            recording.recorders = recorders
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        before, recorders = self._before.pop()
        try:
            if kind is None:
                self._group.modules.mirror_recorded()
        finally:
            current.replica, current.strategy, current.below = before
            recording.recorders = recorders
            end_recording()
        if kind is None:
            self._group.plain.record_use()

    def _recreate_cm(self) -> Scope:
        self._is_used = True  # it decorates a function
        return Scope(self._group)

    def __del__(self) -> None:
        # At the interpreter's end the globals of modules may already be None.
        if not self._is_used and warnings is not None:
            warnings.warn(
                "strategy.scope() was called and never entered, so nothing is mirrored; write "
                "`with strategy.scope():` and make the model inside",
                UserWarning,
                stacklevel=2,
            )


class PlacingScope(ContextDecorator):
    """The scope of a strategy that does not mirror modules, but places their variables.

    Args:
        recorded: records the modules that are created.
        check_usable: raises StrategyError if the strategy is closed; its argument names the call.
    """

    def __init__(
        self, strategy: Any, recorded: RecordedModules, check_usable: Callable[[str], None]
    ) -> None:
        self._strategy, self._recorded, self._check_usable = strategy, recorded, check_usable
        self._before: list[tuple[Context, ExitStack]] = []

    def __enter__(self) -> None:
        self._check_usable("scope")
        check_no_other_scope(self._strategy)
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


def check_no_other_scope(strategy: object) -> None:
    """Raises StrategyError if the scope of another strategy is open."""
    if current.strategy is not None and current.strategy is not strategy:
        raise StrategyError(
            f"the scope of {current.strategy!r} is open; a scope of another strategy cannot "
            "be opened inside it"
        )
