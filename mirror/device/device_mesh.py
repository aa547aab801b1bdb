"""DeviceMesh: the devices of each replica, one or several.

[Note: Places]
If a model does not fit on one device, its layers are placed on several per replica. The program
names the first replica's devices; for another replica, position k means its own k-th device:

                 position 0  1
    replica 0        cuda:0  cuda:1     the names in the program
    replica 1        cuda:2  cuda:3     their meaning on replica 1

A variable, an argument or an output at position k is at position k of every replica; values are
reduced per position. An argument from any other device goes to position 0. Devices named in a
replica's code are translated (``device/device_remap.py``). No GPU is at two positions, so a device
determines its position. Simulated devices are one CPU: all are at position 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirror.devices import is_simulated
from mirror.errors import DeviceError


class DeviceMesh:
    """The devices of all replicas.

    Args:
        rows: the devices of each replica; all have the same number.

    Attributes:
        devices: all devices, each once.
        is_model_parallel: whether each replica has several distinct devices.
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

        For any other device, returns those at position 0.
        """
        return self._columns.get(device, self.positions[0])

    def translate(self, device: torch.device, one: torch.device) -> torch.device:
        """Returns the device at the same position of the replica that has device ``one``.

        Returns the device itself if it belongs to no replica.
        """
        column = self._columns.get(device)
        return device if column is None else column[self._replica_ids[one]]

    def position_of(self, device: torch.device, name: str) -> torch.device:
        """Returns the device of the first replica's copy of a variable.

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
        """Returns a replica's devices by the first replica's device at the same position."""
        return dict(zip(self.replicas[0], self.replicas[replica_id], strict=True))
