"""``optimizer.zero_grad()`` over mirrored parameters: all at once, where nothing is pending.

Torch's own goes through the parameters one by one, and every look at ``p.grad`` asks first whether
a reduction is to be waited for. Here that is asked once.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer

from mirror.compiler import opaque


def watch_zero_grad() -> None:
    """Wraps ``Optimizer.zero_grad``, for good; call it once."""
    original = Optimizer.zero_grad

    @opaque
    @functools.wraps(original)
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        mirror: Any = self.__dict__.get("_mirror")  # there from its first step on
        if mirror is None or not set_to_none or not mirror.clear_gradients():
            original(self, set_to_none)

    Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
