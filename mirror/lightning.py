"""A strategy of Lightning's Trainer and of Fabric: one process, one loop, N devices.

Lightning sees a single device, the first one: the world size is 1, loaders get no sampler,
``self.log`` synchronizes nothing, checkpoints are those of one device. Where Lightning would move
a module to its device, the module is mirrored; from then on its calls are split.

The Trainer and Fabric have different base classes for strategies, with methods of the same name
and other arguments. One class serves both. Only Fabric sets ``precision`` to a plugin when it
takes a strategy, so ``precision`` shows which of the two uses this object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

try:
    from lightning.fabric.strategies import SingleDeviceStrategy as FabricStrategy
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import SingleDeviceStrategy as TrainerStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mirror.lightning needs Lightning: pip install 'mirror-strategy[lightning]'",
        name=error.name,
    ) from error

from mirror.errors import StrategyError
from mirror.strategy.mirrored import MirroredStrategy as _MirroredStrategy
from mirror.strategy.strategy_base import Strategy

__all__ = ["MirroredStrategy"]


class MirroredStrategy(TrainerStrategy, FabricStrategy):  # type: ignore[misc]
    """Mirrors the module of a Trainer, or of Fabric, on all devices of one process.

    ::

        trainer = L.Trainer(strategy=mirror.lightning.MirroredStrategy(["cuda:0", "cuda:1"]))
        fabric = L.Fabric(strategy=mirror.lightning.MirroredStrategy(["cuda:0", "cuda:1"]))

    Loaders yield the batches of one device; each is split over the replicas. One object serves one
    Trainer or one Fabric. Leave their argument ``devices`` out, or pass 1.

    Args:
        devices: the devices for ``mirror.MirroredStrategy``, or an existing mirror strategy;
            the module may have been created in its scope.
        compile: whether the layers of the module are compiled, see ``Strategy.compile``.
        **options: the other arguments of ``mirror.MirroredStrategy``.

    Attributes:
        mirror: the strategy of mirror.

    Raises:
        StrategyError: both an existing strategy and options are given.
    """

    strategy_name = "mirror"

    def __init__(
        self,
        devices: Strategy | Sequence[torch.device | str | int] | None = None,
        *,
        compile: bool = False,  # noqa: A002  as in keywords of other frameworks
        **options: Any,
    ) -> None:
        if not isinstance(devices, Strategy):
            self.mirror: Strategy = _MirroredStrategy(devices, **options)
        elif options:
            raise StrategyError(
                f"an existing strategy was given together with {', '.join(options)}, which it "
                "already has; leave them out"
            )
        else:
            self.mirror = devices
        self._compiles = compile
        FabricStrategy.__init__(self, device=self.mirror.devices[0])
        TrainerStrategy.__init__(self, device=self.mirror.devices[0])

    @property
    def precision(self) -> Any:
        return FabricStrategy.precision.fget(self)

    @precision.setter
    def precision(self, precision: Any) -> None:
        self._kind: Any = TrainerStrategy if precision is None else FabricStrategy
        FabricStrategy.precision.fset(self, precision)

    def model_to_device(self) -> None:
        self._mirror(self.model, update="eager")  # the Trainer steps with a closure

    def module_to_device(self, module: nn.Module) -> None:
        self._mirror(module, update="captured")

    def _mirror(self, module: nn.Module, *, update: Literal["captured", "eager"]) -> None:
        self.mirror.mirror(module)
        if not self._compiles:
            return
        # A LightningModule leads to the Trainer, which changes in each step; its layers do not.
        is_lightnings = isinstance(module, LightningModule)
        for layer in module.children() if is_lightnings else [module]:
            if next(layer.parameters(), None) is not None:
                self.mirror.compile(layer, update=update)

    # The Trainer and Fabric call these by one name, with different arguments.

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
        precision = self.precision_plugin if self._kind is TrainerStrategy else self.precision
        for part in (precision, self.accelerator, self.checkpoint_io):
            if part is not None:
                part.teardown()
