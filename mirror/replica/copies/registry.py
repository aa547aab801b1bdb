"""Registry: which tensors a strategy has mirrored, for as long as they live."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn

T = TypeVar("T")


class MirroredTensors:
    """The tensors that a strategy owns.

    Attributes:
        has_owned: whether there has been any.
        num_owned: how many there have been.
    """

    def __init__(self) -> None:
        self._owned: dict[int, weakref.ref[Tensor]] = {}
        self.has_owned = False
        self.num_owned = 0

    def own(self, tensor: Tensor, on_gone: Callable[[int], object] | None = None) -> None:
        """Registers a tensor.

        Args:
            on_gone: called with its ``id`` when it is gone. A garbage collection may do that at
                any time: it takes no lock.
        """
        key, owned = id(tensor), self._owned
        self.has_owned = True
        self.num_owned += 1

        # Bound here: when the interpreter ends, the globals of modules may be None already.
        def disown(reference: object, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
            if is_ending():  # nothing is left to be kept in order
                return
            if owned.get(key) is reference:
                del owned[key]
                if on_gone is not None:
                    on_gone(key)

        owned[key] = weakref.ref(tensor, disown)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of them."""
        owned = self._owned.get(id(tensor))
        return owned is not None and owned() is tensor

    def tensors(self) -> list[Tensor]:
        """Returns the parameters and buffers, mirrored or the only replica's."""
        tensors = (reference() for reference in list(self._owned.values()))
        return [tensor for tensor in tensors if tensor is not None]

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters, mirrored or the only replica's."""
        return [tensor for tensor in self.tensors() if isinstance(tensor, nn.Parameter)]

    def put_in_order(self, keys: Sequence[int]) -> None:
        """Moves the tensors with these ``id``s to the end, in this order."""
        put_in_order(self._owned, keys)


def put_in_order(known: dict[int, T], keys: Sequence[int]) -> None:
    """Moves the entries of these keys to the end, in this order."""
    for key in keys:
        if key in known:
            known[key] = known.pop(key)
