"""Copies of the user's tensors on all devices, synchronized in both directions.

[Note: Two sides]
The user's model and optimizer state are ordinary torch tensors on the host, and they are the truth
between two runs. The devices have copies. Before a run, a tensor is sent again if its bits differ
from those that were last read back. After a run, all changed values are read back into the user's
tensors, in place. So checkpoints, ``state_dict``, evaluation on the host and other strategies see
current values without any notification. The cost of a run is a comparison of all tensors and a
transfer of the changed ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.replica.replica_checks import same_bits

Key = Any


class TpuCopies:
    """The copies of tensors on the devices, equal on all of them.

    Args:
        jax: the module.
        sharding: the sharding that gives each device the whole tensor.

    Attributes:
        sent: the number of tensors that were sent to the devices so far.
    """

    def __init__(self, jax: Any, sharding: Any) -> None:
        self._jax, self._sharding = jax, sharding
        self._known: dict[Key, tuple[Tensor, Any]] = {}
        self.sent = 0

    def device_copy(self, key: Key, tensor: Tensor) -> Any:
        """Returns the device array with a tensor's current values."""
        known = self._known.get(key)
        if known is None or not same_bits(known[0], tensor):
            self.sent += 1
            known = tensor.detach().clone(), self._jax.device_put(to_numpy(tensor), self._sharding)
            self._known[key] = known
        return known[1]

    def put(self, key: Key, array: Any, tensor: Tensor) -> None:
        """Records the new array of a tensor, and writes its values into the user's tensor."""
        values = from_numpy(np.asarray(array))
        with torch.no_grad():
            tensor.copy_(values)
        self._known[key] = values, array

    def clear(self) -> None:
        """Drops all copies."""
        self._known.clear()

    def arrays(self) -> dict[Key, Any]:
        """Returns all arrays by key."""
        return {key: array for key, (_, array) in self._known.items()}


def to_numpy(tensor: Tensor) -> Any:
    """Returns a tensor's values as an array with its own memory, for jax."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes  # a dependency of jax

        return tensor.contiguous().view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
    return np.array(tensor.numpy())


def from_numpy(array: Any) -> Tensor:
    """Returns an array's values as a tensor with its own memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
