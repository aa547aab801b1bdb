"""Places: where the replicas of a strategy are, each on one device or on several.

[Note: Places]
A replica has several devices where one cannot hold the model: its layers are placed on them. The
program is written for the first replica, and what it says of the device at position k of that one
means, for any other replica, its own device at position k:

                 position 0  1
    replica 0        cuda:0  cuda:1     what the program names
    replica 1        cuda:2  cuda:3     what it means there

    a variable on the first replica's k    has a copy on every replica's k
    gradients, and all that is reduced     are, position by position: ``collectives/placed.py``
    an argument of a split call            goes from the first replica's k to the replica's own k,
                                           from anywhere else to its position 0
    an output                              comes to the first replica's k from any replica's k
    a device that a replica's code names   is renamed: ``device/device_remap.py``

No GPU is in two places, so a device tells its position, and whether it has been renamed already.
Simulated devices are all the one CPU: there every position is position 0, and nothing has to be
renamed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirror.devices import is_simulated
from mirror.errors import DeviceError


class DeviceMesh:
    """Where replicas are.

    Args:
        rows: each replica's devices, equally many.

    Attributes:
        devices: all of them, each once.
        are_several: whether a replica has several, that can be told apart.
    """

    def __init__(self, rows: Sequence[Sequence[torch.device]]) -> None:
        self.replicas = tuple(map(tuple, rows))
        self.devices = tuple(dict.fromkeys(device for row in self.replicas for device in row))
        self.is_model_parallel = len(self.replicas[0]) > 1 and not is_simulated(self.devices)
        columns: tuple[tuple[torch.device, ...], ...] = tuple(zip(*self.replicas, strict=True))
        self.positions = columns if self.is_model_parallel else columns[:1]
        of_several = self.positions if self.is_model_parallel else ()
        self._columns = {device: column for column in of_several for device in column}
        self._replica_ids = {d: r for r, row in enumerate(self.replicas) for d in row}

    def __str__(self) -> str:
        rows = [", ".join(map(str, row)) for row in self.replicas]
        return ", ".join(rows if len(self.replicas[0]) == 1 else [f"[{row}]" for row in rows])

    def replica_at(self, device: torch.device) -> tuple[torch.device, ...]:
        """Returns the replicas' devices at the position of a device of one of them.

        Those at position 0 for any other.
        """
        return self._columns.get(device, self.positions[0])

    def translate(self, device: torch.device, one: torch.device) -> torch.device:
        """Returns what a device means to the replica that has another one.

        The device itself, if it is no replica's.
        """
        column = self._columns.get(device)
        return device if column is None else column[self._replica_ids[one]]

    def position_of(self, device: torch.device, name: str) -> torch.device:
        """Returns where the first replica's copy of a variable is.

        Raises:
            DeviceError: the variable is on a GPU that is not the first replica's.
        """
        home = self.replica_at(device)[0]
        if self.is_model_parallel and device.type == "cuda" and device != home:
            places = ", ".join(map(str, self.replicas[0]))
            raise DeviceError(
                f"a model whose layers are placed is made on the devices of the first replica, "
                f"{places}, and the others get copies at the same positions of theirs; {name!r} "
                f"is on {device}; move it to one of {places} before it is mirrored"
            )
        return home

    def names(self, replica_id: int) -> dict[torch.device, torch.device]:
        """Returns what the first replica's devices mean to another one."""
        return dict(zip(self.replicas[0], self.replicas[replica_id], strict=True))
