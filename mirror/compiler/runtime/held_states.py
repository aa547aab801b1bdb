"""States: an optimizer's state tensors on one replica, found anew when they are replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mirror.compiler.state_tensors import StateTensor
from mirror.values import are_identical


class HeldStates:
    """An optimizer's state tensors on one replica, in the order of a trace's inputs.

    Args:
        wanted: of each input the parameter, and the name in its entry.
        replica_id: the first one on its device.

    Raises:
        KeyError: there is no such state.
    """

    def __init__(
        self, optimizer: Optimizer, wanted: Sequence[tuple[StateTensor, Any]], replica_id: int
    ) -> None:
        self._optimizer, self._replica_id = optimizer, replica_id
        self._wanted = list(wanted)
        self._mirror: Any = vars(optimizer).get("_mirror") if replica_id else None
        self._state: Any = None
        self._entries: list[Any] = []
        self._places: list[tuple[dict[Any, Any], Any]] = []
        self.tensors = self.now()

    def now(self) -> list[Tensor]:
        """Returns the tensors there are now.

        Raises:
            KeyError: one that was there is missing.
        """
        mirror: Any = self._mirror
        state = (
            self._optimizer.state if mirror is None else mirror.states.state_of(self._replica_id)
        )
        # Past what the state of mirrored parameters does when it is looked into.
        entries = [*dict.values(state)]
        if state is not self._state or not are_identical(entries, self._entries):
            self._places = self._find(state)
            self._state, self._entries = state, entries
        return [entry[name] for entry, name in self._places]

    def _find(self, state: Any) -> list[tuple[dict[Any, Any], Any]]:
        by_id = {id(key): entry for key, entry in dict.items(state)}
        places = []
        for place, name in self._wanted:
            key = place.owner if self._mirror is None else place.on_replica(self._replica_id)
            entry, device = by_id[id(key)], place.on_replica(self._replica_id).device
            # Programs of GPUs count there: what the host counts, a CUDA graph would not see.
            if not entry[name].dim() and entry[name].device != device:
                entry[name] = entry[name].to(device)
            places.append((entry, name))
        return places

    def are_as_before(self) -> bool:
        """Whether the tensors are the same, or alike ones in their place; keeps those."""
        try:
            tensors = self.now()
        except KeyError:
            return False
        if are_identical(tensors, self.tensors):
            return True
        alike = all(
            isinstance(now, Tensor)
            and now.shape == then.shape
            and now.dtype == then.dtype
            and now.stride() == then.stride()
            for now, then in zip(tensors, self.tensors, strict=True)
        )
        if alike:
            self.tensors = tensors
        return alike
