"""SliceExchange: copies slices of parameters from the replicas that have them to all others.

Flat means in the order in which the elements are in memory, so a weight in channels-last layout
can be cut, too. There is one ``all_gather`` for each dtype, of buffers that have a section for
each replica of all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mirror.base.timeline import CROSS, REDUCTION
from mirror.comm.communicator import DTYPES
from mirror.execution.replicas import Replicas
from mirror.replica.gradients.slice_plan import ParamSlice


class SliceExchange:
    """The copies of some slices from their replicas to all others.

    Args:
        views: per local replica, the memory of every slice. Over several workers all are flat.
        positions: the slices that are copied, the same on all workers.
    """

    def __init__(
        self,
        replicas: Replicas,
        slices: Sequence[ParamSlice],
        views: Sequence[Sequence[Tensor]],
        positions: Sequence[int],
    ) -> None:
        self._replicas = replicas
        self._sections: list[_Sections] = []
        self._copies: list[tuple[Tensor, Tensor]] = []  # of slices that are not flat
        self._name = f"values of {len(positions)} slices"
        by_dtype: dict[torch.dtype, list[list[int]]] = {}
        for i in positions:
            if views[0][i].dim() == 1 and views[0][i].layout is torch.strided:
                of_replicas = by_dtype.setdefault(
                    views[0][i].dtype, [[] for _ in range(replicas.workers.num_replicas)]
                )
                of_replicas[slices[i].replica_id].append(i)
            else:
                source = views[slices[i].replica_id][i]
                self._copies += [(own[i], source) for own in views if own[i] is not source]
        for of_replicas in by_dtype.values():
            self._sections.append(_Sections(of_replicas, views, replicas))

    def all_gather(self) -> None:
        """Copies the slices; enqueued on the current stream of each device."""
        self._replicas.timeline.begin(CROSS, REDUCTION, self._name)
        for sections in self._sections:
            sections.all_gather(self._name)
        for destination, source in self._copies:
            destination.copy_(source)
        self._replicas.timeline.end(CROSS, REDUCTION)


class _Sections:
    """Slices of one dtype that are gathered at once: one section of a flat buffer per replica."""

    def __init__(
        self,
        of_replicas: Sequence[Sequence[int]],
        views: Sequence[Sequence[Tensor]],
        replicas: Replicas,
    ) -> None:
        self._replicas, self._workers = replicas, replicas.workers
        first = self._workers.replica_offset

        def bits(view: Tensor) -> Tensor:
            return view if view.dtype in DTYPES else view.view(torch.uint8)

        # views[r] of the slices that replica s of all workers has stepped, by r and s
        parts = [[[bits(own[i]) for i in mine] for mine in of_replicas] for own in views]
        self._sizes = [[view.numel() for view in mine] for mine in parts[0]]
        self._length = max(map(sum, self._sizes))
        self._sources = {first + r: mine[first + r] for r, mine in enumerate(parts)}
        self._destinations = {
            first + r: [view for s, mine in enumerate(own) if s != first + r for view in mine]
            for r, own in enumerate(parts)
        }
        self._dtype = next(view.dtype for mine in parts[0] for view in mine)

    def all_gather(self, what: str) -> None:
        length, workers = self._length, self._workers
        begins = [length * section for section in workers.sections]
        total = length * workers.size * max(workers.counts)
        make = partial(torch.empty, total, dtype=self._dtype)
        buffers = [make(device=device) for device in self._replicas.devices]
        for buffer, (r, sources) in zip(buffers, self._sources.items(), strict=True):
            if sources:
                torch.cat(sources, out=buffer[begins[r] : begins[r] + sum(self._sizes[r])])
        if workers.is_multi_process:
            workers.all_gather(what, buffers)
        else:
            self._replicas.communicator.all_gather(buffers)
        for buffer, (r, destinations) in zip(buffers, self._destinations.items(), strict=True):
            if destinations:
                parts: list[Tensor] = []
                for s, sizes in enumerate(self._sizes):
                    if s != r and sizes:
                        section = buffer[begins[s] : begins[s] + sum(sizes)]
                        parts += section.split_with_sizes(sizes)
                torch._foreach_copy_(destinations, parts)


def view_flat(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor without gaps: its elements in the order of memory."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns the elements of a tensor in the order in which those of ``like`` are in memory.

    It is a view if both have the same strides, else a copy.
    """
    tensor = tensor.detach()
    if tensor.stride() != like.stride() and not (tensor.is_contiguous() and like.is_contiguous()):
        tensor = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return view_flat(tensor)
