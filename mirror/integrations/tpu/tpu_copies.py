"""Copies of the user's tensors on all devices, which follow them in both directions.

[Note: Two sides]
The user's model and optimizer state are ordinary tensors of torch in memory of the host, and the
truth between two runs. The devices have copies. Before a run a tensor is sent again if its bits
are not those that were read back last: whoever has changed it, and however. After a run all that
it has changed is read back into the user's tensors, in place. So checkpoints, ``state_dict``, an
evaluation on the host and other strategies see what is true, and nobody has to be told; it costs
a comparison and a transfer of what was changed for each run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.replica.params.bitwise import same_bits

Key = Any


class TpuCopies:
    """What tensors are on the devices, each the same on all.

    Args:
        jax: the module.
        sharding: says that each device has the whole of a tensor.

    Attributes:
        sent: how many tensors have been sent to the devices so far.
    """

    def __init__(self, jax: Any, sharding: Any) -> None:
        self._jax, self._sharding = jax, sharding
        self._known: dict[Key, tuple[Tensor, Any]] = {}
        self.sent = 0

    def copy_of(self, key: Key, tensor: Tensor) -> Any:
        """Returns the array that has a tensor's values now."""
        known = self._known.get(key)
        if known is None or not same_bits(known[0], tensor):
            self.sent += 1
            known = tensor.detach().clone(), self._jax.device_put(to_numpy(tensor), self._sharding)
            self._known[key] = known
        return known[1]

    def put(self, key: Key, array: Any, tensor: Tensor) -> None:
        """Takes over what a run has made of a tensor, and writes it into the user's."""
        values = from_numpy(np.asarray(array))
        with torch.no_grad():
            tensor.copy_(values)
        self._known[key] = values, array

    def clear(self) -> None:
        """Forgets all."""
        self._known.clear()

    def arrays(self) -> dict[Key, Any]:
        """Returns all arrays by key."""
        return {key: array for key, (_, array) in self._known.items()}


def to_numpy(tensor: Tensor) -> Any:
    """Returns a tensor's values in memory of their own, as jax takes them."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes  # which jax brings

        return tensor.contiguous().view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
    return np.array(tensor.numpy())


def from_numpy(array: Any) -> Tensor:
    """Returns an array's values as a tensor with memory of its own."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
