"""A strategy of Lightning's Trainer and of Fabric: one process, one loop, N devices.

[Note: One device to Lightning]
To Lightning this is a single device, the first one: the world's size is 1, no sampler is put into
loaders, ``self.log`` has nothing to synchronize, checkpoints are those of one device. A module
is mirrored where Lightning would move it to its device; its calls are split from then on.

The Trainer and Fabric each have a base class of their own for strategies, and some methods of the
same name with other arguments. One class is both. Fabric alone sets ``precision``, when it
takes a strategy, so that tells whose it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

try:
    from lightning.fabric.strategies import SingleDeviceStrategy as OfFabric
    from lightning.pytorch.strategies import SingleDeviceStrategy as OfTrainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mirror.lightning needs Lightning: pip install 'mirror-strategy[lightning]'",
        name=error.name,
    ) from error

from mirror.errors import StrategyError
from mirror.strategy.mirrored import MirroredStrategy as _MirroredStrategy
from mirror.strategy.strategy_base import Strategy


class MirroredStrategy(OfTrainer, OfFabric):  # type: ignore[misc]
    """Mirrors the module of a Trainer, or of Fabric, on all devices of one process.

    ::

        trainer = L.Trainer(strategy=mirror.lightning.MirroredStrategy(["cuda:0", "cuda:1"]))
        fabric = L.Fabric(strategy=mirror.lightning.MirroredStrategy(["cuda:0", "cuda:1"]))

    The batches of the loaders are those of one device: each is split over the replicas. One object
    is for one Trainer or one Fabric. Leave ``devices`` of these out, or 1.

    Args:
        devices: those of ``mirror.MirroredStrategy``, or a mirror strategy, whose scope the
            module may have been made in.
        **options: the other arguments of ``mirror.MirroredStrategy``.

    Attributes:
        mirror: the strategy of mirror.

    Raises:
        StrategyError: options for a strategy that is there already.
    """

    strategy_name = "mirror"

    def __init__(
        self, devices: Strategy | Sequence[torch.device | str | int] | None = None, **options: Any
    ) -> None:
        if not isinstance(devices, Strategy):
            self.mirror: Strategy = _MirroredStrategy(devices, **options)
        elif options:
            raise StrategyError(
                f"a strategy was given, and {', '.join(options)}, which it has already; leave "
                "them out"
            )
        else:
            self.mirror = devices
        OfFabric.__init__(self, device=self.mirror.devices[0])
        OfTrainer.__init__(self, device=self.mirror.devices[0])

    @property
    def precision(self) -> Any:
        return OfFabric.precision.fget(self)

    @precision.setter
    def precision(self, precision: Any) -> None:
        self._kind: Any = OfTrainer if precision is None else OfFabric
        OfFabric.precision.fset(self, precision)

    def model_to_device(self) -> None:
        self.mirror.mirror(self.model)

    def module_to_device(self, module: nn.Module) -> None:
        self.mirror.mirror(module)

    # What the Trainer and Fabric call by one name, with other arguments.

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._kind.backward(self, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._kind.optimizer_step(self, *args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._kind.save_checkpoint(self, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        return self._kind.load_checkpoint(self, *args, **kwargs)

    def tensor_init_context(self, *args: Any, **kwargs: Any) -> Any:
        return self._kind.tensor_init_context(self, *args, **kwargs)

    def teardown(self) -> None:
        """Ends what Lightning began; module and optimizer state stay on the replicas' devices."""
        precision = self.precision_plugin if self._kind is OfTrainer else self.precision
        for part in (precision, self.accelerator, self.checkpoint_io):
            if part is not None:
                part.teardown()
