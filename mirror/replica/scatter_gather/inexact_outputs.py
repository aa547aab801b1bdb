"""What is told, once, of 0-d outputs that may not be what one device gives."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from mirror.replica.exactness.loss_reduction import NotReducible
from mirror.replica.scatter_gather.scatter import ReplicaArgs
from mirror.threads.user_frames import warn_user

_known: WeakKeyDictionary[type[nn.Module], set[str]] = WeakKeyDictionary()
_looked: WeakSet[nn.Module] = WeakSet()


def warn_of_ignored(module: nn.Module, parts: Sequence[ReplicaArgs]) -> None:
    """Looks at what compiled code was handed, at the first call: it waits for the devices.

    Raises:
        Undecided: labels that a loss ignores were among it.
    """
    if module in _looked:
        return
    _looked.add(module)
    if any(part.has_ignored() for part in parts):
        raise NotReducible("of compiled code, and of labels below zero, ignored perhaps")


def warn_once(kind: type[nn.Module], what: str) -> None:
    """Tells what an averaged value of a module of this type is."""
    known = _known.setdefault(kind, set())
    if what in known:
        return
    known.add(what)
    warn_user(
        f"a 0-d output of {kind.__name__} is averaged over the parts of the batch by their "
        f"numbers of examples, which is exact for a mean over examples; what came is {what}, and "
        "the result is not what one device gives. Return one value per example, or compute the "
        "loss outside the model; the number by which a sum is divided can be passed as "
        "num_items_in_batch, the whole batch's"
    )
