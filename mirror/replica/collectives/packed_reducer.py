"""Reducer: sums lists of tensors over the replicas, in packs, on the wire in a dtype of choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mirror.comm.host.host_backend import HostCommunicator
from mirror.comm.host.host_library import missing_reason
from mirror.comm.packing import move_into_flats
from mirror.device.current_streams import ReplicaStreams
from mirror.execution.replicas import Replicas


class MovedTensors(NamedTuple):
    """Gradients where they are reduced, one list per replica.

    Attributes:
        columns: the gradients themselves: some of them views of ``buffers``.
        staying: the positions of the others.
    """

    columns: Sequence[list[Tensor]]
    buffers: Sequence[Sequence[Tensor]]
    staying: Sequence[int]


class Reducer:
    """Sums gradients over the replicas.

    Args:
        bytes_per_pack: what a collective takes at once, in bytes.
        wire_dtype: what floating tensors are sent as; ``None``: as they are.

    Attributes:
        is_on_host: whether the host library sums, or would, if there were several.
    """

    def __init__(
        self, replicas: Replicas, bytes_per_pack: int, wire_dtype: torch.dtype | None
    ) -> None:
        self._replicas = replicas
        self.wire_dtype = wire_dtype
        self.bytes_per_pack = bytes_per_pack
        alone = replicas.are_simulated and replicas.num_replicas == 1
        of_host = isinstance(replicas.communicator, HostCommunicator)
        self.is_on_host = (alone or of_host) and missing_reason() is None

    def move(
        self, columns: Sequence[list[Tensor]], streams: ReplicaStreams | None
    ) -> MovedTensors:
        """Moves gradients to where they are reduced: into flat buffers, if the backend packs.

        Views replace them in their lists. What is sent in another dtype is packed on its way: to
        move it as well would be a copy more.

        Args:
            streams: of GPUs, those on which replicas may use what is made here.
        """
        if self.wire_dtype is not None or not self._replicas.communicator.packs:
            return MovedTensors(columns, [], range(len(columns[0])))
        before = [list(column) for column in columns]
        # What is made in inference mode, where somebody may look first, could not be changed.
        with torch.inference_mode(False), torch.no_grad():
            moved = MovedTensors(columns, *move_into_flats(columns, self.bytes_per_pack))
        if streams is not None:
            staying = set(moved.staying)
            gone = [[t for i, t in enumerate(mine) if i not in staying] for mine in before]
            streams.keep(gone, moved.buffers)
        return moved

    def all_reduce(self, moved: MovedTensors, scale: float) -> None:
        """Sums the gradients over the replicas, in place, and multiplies by ``scale``."""
        columns, buffers, staying = moved
        lists, bytes_per_pack = columns, self.bytes_per_pack
        if any(buffers):
            lists, bytes_per_pack = [], 0  # these are packs already
            for mine, column in zip(buffers, columns, strict=True):
                lists.append([*mine, *[column[i] for i in staying]])
        self._replicas.communicator.all_reduce_checked(
            lists, "sum", scale, bytes_per_pack, self.wire_dtype
        )
