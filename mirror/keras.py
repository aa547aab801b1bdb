"""Keras layers for mirrored models: ``BatchNormalization`` over the whole batch. Imports Keras."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mirror.errors import StrategyError
from mirror.execution.run import Replica, current
from mirror.replica.layers.sync_batch_norm import gather_rows
from mirror.replica.modules.module_owner import owner_of

try:
    import keras
except ModuleNotFoundError as error:  # Keras, or another library that it would compute with
    raise ModuleNotFoundError(
        f"{error}; mirror.keras takes Keras over torch: pip install 'mirror-strategy[keras]', and "
        'os.environ["KERAS_BACKEND"] = "torch" before Keras is imported',
        name=error.name,
    ) from error

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable(package="mirror")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalisation with the statistics of the whole batch; N replicas equal one device.

    The arguments are those of ``keras.layers.BatchNormalization``; masks are respected. Outside a
    mirrored model it is that layer. There is one collective in the forward and one in the backward
    pass; see ``layers/sync_batch_norm.py``.

    Raises:
        StrategyError: ``synchronized=True`` is given, which Keras has for other backends.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("synchronized", False):
            raise StrategyError(
                "synchronized=True is Keras's own way, which does not work over torch; leave it "
                "out, this layer synchronizes the replicas by itself"
            )
        super().__init__(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which Keras creates the layer again."""
        config: dict[str, Any] = super().get_config()
        config.pop("synchronized", None)
        return config

    def _moments(self, inputs: Tensor, mask: Tensor | None) -> Any:
        replica = current.replica
        owner = owner_of(self)
        if replica is None or replica.replicas is not owner or not owner.mirrors:
            return super()._moments(inputs, mask)
        return _whole_batch(replica, inputs.movedim(self.axis, -1), mask)


# The method is private to Keras: without it the layer would silently normalise one replica's part.
if not hasattr(keras.layers.BatchNormalization, "_moments"):
    raise ImportError(
        f"keras {keras.__version__} takes the moments of BatchNormalization in another way than "
        "3.15, so mirror.keras cannot take them over the replicas; install keras 3.15"
    )


def _whole_batch(replica: Replica, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns mean and biased variance per channel, which is last; differentiable."""
    channels = x.shape[-1]
    if mask is None:
        rows = x.reshape(-1, channels)
    else:
        rows = x[mask.to(x.device, torch.bool).expand(x.shape[:-1])]
    count = rows.new_full((1,), rows.shape[0])
    mean = rows.sum(0) / max(1, rows.shape[0])
    row = torch.cat([mean, (rows - mean).square().sum(0), count]).unsqueeze(0)
    table = gather_rows(replica, row)
    means, squares, counts = table.split([channels, channels, 1], dim=1)
    counts = counts.detach()
    # With a mask Keras adds epsilon to the divisor.
    total = counts.sum() if mask is None else counts.sum() + keras.config.epsilon()
    whole = (means * counts).sum(0) / total
    return whole, (squares + counts * (means - whole).square()).sum(0) / total
