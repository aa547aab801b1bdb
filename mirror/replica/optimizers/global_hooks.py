"""The hooks of all optimizers' steps in the process: mirror's around everybody else's.

[Note: Around a step]
Torch calls global hooks in the order in which they were registered; those before a step before the
optimizer's own, those after it after these. Mirror's enclose them all, whoever came first. So the
time of a step is all of it, and the user's hooks, global ones like an optimizer's own, see the
optimizer as its step does: while it is lent.

    before    the step begins    it is lent        the user's, global and the optimizer's
    after     the user's         it is given back  the step ends

Strategies of one replica lend nothing, and install the outer pair only; the first one of several
installs all four anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from mirror.base.torch_private import step_hooks

StepHook = Callable[..., Any]


class GlobalHooks:
    """Mirror's global hooks of optimizer steps. See [Note: Around a step]."""

    def __init__(self) -> None:
        self._before: list[RemovableHandle] = []
        self._after: list[RemovableHandle] = []
        self._num_own = 0  # before a step, and after
        self._all_before: Any = {}  # torch's ordered dicts, once installed
        self._all_after: Any = {}

    def install(self, before: tuple[StepHook, ...], after: tuple[StepHook, ...]) -> None:
        """Installs these in place of those that are there, around all others."""
        for handle in (*self._before, *self._after):
            handle.remove()
        self._before = [*map(register_optimizer_step_pre_hook, before)]
        self._after = [*map(register_optimizer_step_post_hook, after)]
        self._num_own = len(before)
        self._all_before = self._before[0].hooks_dict_ref()
        self._all_after = self._after[0].hooks_dict_ref()
        for handle in reversed(self._before):
            self._all_before.move_to_end(handle.id, last=False)

    def enclose(self) -> None:
        """Has mirror's be the last ones after a step, when others were registered since."""
        if next(reversed(self._all_after)) != self._after[-1].id:
            for handle in self._after:
                self._all_after.move_to_end(handle.id)

    @property
    def has_others(self) -> bool:
        """Whether there are hooks of the user's."""
        own = self._num_own
        return len(self._all_before) > own or len(self._all_after) > own

    def __len__(self) -> int:
        return len(self._before)


global_hooks = GlobalHooks()


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks of the user's would see one replica's step only."""
    return bool(step_hooks(optimizer)) or global_hooks.has_others
