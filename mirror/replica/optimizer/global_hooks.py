"""Mirror's hooks of all optimizers' steps in the process, and their order.

[Note: Around a step]
Torch calls global hooks in the order in which they were registered. Whichever strategy comes
first, the time of a step is all of it:

    before    the step begins    the optimizer is lent
    after     it is given back   the step ends

Strategies of one replica lend nothing, and install the outer pair only; the first one of several
installs all four anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

StepHook = Callable[..., Any]


class GlobalHooks:
    """Mirror's global hooks of optimizer steps. See [Note: Around a step]."""

    def __init__(self) -> None:
        self._before: list[RemovableHandle] = []
        self._after: list[RemovableHandle] = []

    def install(self, before: tuple[StepHook, ...], after: tuple[StepHook, ...]) -> None:
        """Installs these in place of those that are there."""
        for handle in (*self._before, *self._after):
            handle.remove()
        self._before = [*map(register_optimizer_step_pre_hook, before)]
        self._after = [*map(register_optimizer_step_post_hook, after)]

    def __len__(self) -> int:
        return len(self._before)


global_hooks = GlobalHooks()
