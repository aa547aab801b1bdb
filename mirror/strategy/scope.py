"""The scope of a strategy: where it is current, and what is made is mirrored."""

from __future__ import annotations

import warnings
from contextlib import ContextDecorator
from types import TracebackType

from mirror.errors import StrategyError
from mirror.execution.current_replica import Context, current, push_context, save_context
from mirror.replica.keras.keras_call import wrap_keras
from mirror.replica.modules.call_interceptor import MirroredModules
from mirror.replica.modules.recording import begin_recording, end_recording, recording
from mirror.strategy.group import Group


class Scope(ContextDecorator):
    """What ``strategy.scope()`` returns: ``with`` enters it; it warns if nobody ever does."""

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
        refuse_inside_another(self._strategy)
        before, recorders = save_context(), recording.recorders
        try:
            self._before.append((before, recorders))
            push_context(self._strategy, None)
            begin_recording(self._group.modules)
            wrap_keras()
        except BaseException:  # an interrupt: nobody will leave
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
        # When the interpreter ends, the globals of modules may be None already.
        if not self._is_used and warnings is not None:
            warnings.warn(
                "strategy.scope() was called and never entered, so nothing is mirrored; write "
                "`with strategy.scope():` and make the model inside",
                UserWarning,
                stacklevel=2,
            )


def refuse_inside_another(strategy: object) -> None:
    """Raises StrategyError where the scope of another strategy is open."""
    if current.strategy is not None and current.strategy is not strategy:
        raise StrategyError(
            f"the scope of {current.strategy!r} is open; a scope of another strategy cannot "
            "be opened inside it"
        )
