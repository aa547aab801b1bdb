"""The scope of a TPUStrategy: where it is current, and what is made is known to it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from types import TracebackType
from typing import Any

from torch.optim import Optimizer

from mirror.execution.current import Context, current, enter, here
from mirror.server.recording import Model, Recorded
from mirror.strategy.scope import refuse_inside_another
from mirror.torch_private import wrap_once

_made: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Optimizers:
    """The optimizers that were made since there is a TPUStrategy; it keeps none of them alive."""

    def __init__(self) -> None:
        wrap_once(Optimizer, "__init__", _noting)

    def over(self, model: Model) -> list[Optimizer]:
        """Returns those that hold a parameter of a model, in one order for all runs."""
        ids = {id(tensor) for tensor in model.tensors}
        found = [
            optimizer
            for optimizer in _made
            if any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
        ]
        return sorted(found, key=id)


def _noting(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def noting(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _made.add(self)

    return noting


class TpuScope(ContextDecorator):
    """What ``TPUStrategy.scope()`` returns: ``with`` enters it."""

    def __init__(
        self, strategy: Any, recorded: Recorded, check_usable: Callable[[str], None]
    ) -> None:
        self._strategy, self._recorded, self._check_usable = strategy, recorded, check_usable
        self._before: list[tuple[Context, ExitStack]] = []

    def __enter__(self) -> None:
        self._check_usable("scope")
        refuse_inside_another(self._strategy)
        before, stack = here(), ExitStack()
        try:
            self._before.append((before, stack))
            enter(self._strategy, None)
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
