"""How many hooks a program has made, of tensors, nodes, modules: whether it makes any more."""

from __future__ import annotations

from torch.utils.hooks import RemovableHandle


class _Own:
    """How many of them are not the program's."""

    count = 0


def num_hooks() -> int:
    """Returns the number of hooks that the program has made so far; -1 where nobody counts."""
    made: int | None = getattr(RemovableHandle, "next_id", None)
    return -1 if made is None else made - _Own.count


def count_own_hooks(count: int) -> None:
    """Leaves out of account the hooks that a part of this package has just made."""
    _Own.count += count
