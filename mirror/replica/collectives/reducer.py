"""Reducer: sums lists of gradients over the replicas, in packs, and sent in a chosen dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mirror.comm.host.host_backend import HostCommunicator, host_missing_reason
from mirror.comm.packing import move_into_flats
from mirror.device.streams import ReplicaStreams
from mirror.execution.replicas import Replicas


class MovedTensors(NamedTuple):
    """Gradients in the memory where they are reduced, one list per replica.

    Attributes:
        columns: each replica's gradients; those that were packed are views of ``buffers``.
        buffers: each replica's flat buffers.
        staying: the positions of gradients that were not packed.
    """

    columns: Sequence[list[Tensor]]
    buffers: Sequence[Sequence[Tensor]]
    staying: Sequence[int]


class Reducer:
    """Sums gradients over the replicas.

    Args:
        bytes_per_pack: the most bytes that one collective sums.
        wire_dtype: the dtype in which floating tensors are sent; ``None`` for their own.

    Attributes:
        is_on_host: whether the host library sums, or would sum with several replicas.
    """

    def __init__(
        self, replicas: Replicas, bytes_per_pack: int, wire_dtype: torch.dtype | None
    ) -> None:
        self._replicas = replicas
        self.wire_dtype = wire_dtype
        self.bytes_per_pack = bytes_per_pack
        alone = replicas.are_simulated and replicas.num_replicas == 1
        of_host = isinstance(replicas.communicator, HostCommunicator)
        self.is_on_host = (alone or of_host) and host_missing_reason() is None

    def move(
        self, columns: Sequence[list[Tensor]], streams: ReplicaStreams | None
    ) -> MovedTensors:
        """Moves gradients into flat buffers, if the backend packs; views replace them in place.

        Gradients that are sent in another dtype stay: the conversion packs them anyway.

        Args:
            streams: the streams on which replicas may use the buffers; ``None`` without GPUs.
        """
        if self.wire_dtype is not None or not self._replicas.communicator.packs:
            return MovedTensors(columns, [], range(len(columns[0])))
        before = [] if streams is None else [list(column) for column in columns]
        # The first read may happen in inference mode: such tensors cannot be changed later.
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
            lists, bytes_per_pack = [], 0  # the buffers are packs already
            for mine, column in zip(buffers, columns, strict=True):
                lists.append([*mine, *map(column.__getitem__, staying)])
        self._replicas.communicator.all_reduce_checked(
            lists, "sum", scale, bytes_per_pack, self.wire_dtype
        )
