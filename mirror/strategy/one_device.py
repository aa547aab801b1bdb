"""OneDeviceStrategy: one replica, for programs that are written for any number of replicas."""

from __future__ import annotations

import torch

from mirror.base.migration_hints import call_with_hints
from mirror.errors import DeviceError, short_repr
from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.strategy_options import Guards


@call_with_hints
class OneDeviceStrategy(MirroredStrategy):
    """Runs on one named device.

    It is ``MirroredStrategy`` with one device. A program for several devices runs on it without
    threads, for instance in a test or under a debugger.

    Args:
        device: the device or its name; the number 1 for ``"cuda:1"``.
        guards: the checks during training, see ``Guards``.

    Raises:
        DeviceError: the device does not exist, or not exactly one is given.
    """

    def __init__(self, device: torch.device | str | int, *, guards: Guards | None = None) -> None:
        check_single_device("device", device, "mirror.MirroredStrategy(devices)")
        super().__init__([device], guards=guards)


def check_single_device(name: str, device: object, several: str) -> None:
    """Raises DeviceError if a value is not one device; ``several`` names the alternative."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    if not (isinstance(device, (torch.device, str)) or is_number):
        raise DeviceError(
            f"{name} is one device, such as 'cpu' or 'cuda:0'; got {short_repr(device)}; several "
            f"devices go to {several}"
        )
