"""OneDeviceStrategy: one replica, for programs that are written for any number of them."""

from __future__ import annotations

import torch

from mirror.base.migration_hints import call_with_hints
from mirror.errors import DeviceError, short_repr
from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.strategy_options import Guards


@call_with_hints
class OneDeviceStrategy(MirroredStrategy):
    """Puts a model's variables, and what ``run`` runs, on one named device.

    With the members of ``MirroredStrategy``, of which it is the one of one device: a program
    written for several runs here, in a test or under a debugger, without threads.

    Args:
        device: the device or its name; the number 1 for ``"cuda:1"``.
        guards: what the strategy watches while it trains, see ``Guards``.

    Raises:
        DeviceError: the device does not exist, or it is several, or none.
    """

    def __init__(self, device: torch.device | str | int, *, guards: Guards | None = None) -> None:
        check_one("device", device, "mirror.MirroredStrategy(devices)")
        super().__init__([device], guards=guards)


def check_one(name: str, device: object, several: str) -> None:
    """Raises DeviceError for what is not one device, naming what takes ``several``."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    if not (isinstance(device, (torch.device, str)) or is_number):
        raise DeviceError(
            f"{name} is one device, such as 'cpu' or 'cuda:0'; got {short_repr(device)}; several "
            f"devices go to {several}"
        )
