"""The plan of sharded optimizer state: which replica updates which part of each parameter.

A plan is data, made without tensors. The parameters of an elementwise optimizer are laid end to
end in the order in which their gradients arrive, in the buckets of the gradients' reduction. Each
bucket is cut into N runs as ``torch.tensor_split`` cuts it, which is how ``reduce_scatter`` does,
and replica r updates run r of every bucket::

    bucket      [ a a a a a a | b b | c c c c ]     12 elements, N = 3
    replica       0 0 0 0 1 1   1 1   2 2 2 2       slices: a[0:4] a[4:6] b c

So the shards are balanced for any model, nothing is padded, and at most N - 1 parameters of a
bucket are cut. N counts the replicas of all workers, and so do the ids of replicas: every worker
makes the same plan, of its replicas and all others.

An optimizer that is not elementwise needs whole parameters. They go to the replica with the
fewest elements, largest first (Graham, 1969). Sharding optimizer state is stage 1 of ZeRO
(Rajbhandari et al., 2020).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mirror.comm.packing import chunk_ends


class ParamSlice(NamedTuple):
    """A part of one parameter, and the replica that holds its optimizer state and updates it.

    Attributes:
        param_index: the position of the parameter in the ``sizes`` of the plan.
        start, stop: the elements, in the order in which they are in memory.
        replica_id: the replica, among those of all workers.
    """

    param_index: int
    start: int
    stop: int
    replica_id: int


def plan_cut(
    sizes: Sequence[int], buckets: Iterable[Sequence[int]], num_replicas: int
) -> list[ParamSlice]:
    """Plans slices of equal total size, for elementwise optimizers.

    Args:
        sizes: the number of elements of each parameter.
        buckets: the indices of the parameters that are reduced together, in order.
    """
    slices: list[ParamSlice] = []
    for bucket in buckets:
        cuts = chunk_ends(sum(sizes[i] for i in bucket), num_replicas)
        r = begin = 0
        for index in bucket:
            start, size = 0, sizes[index]
            if size == 0:
                slices.append(ParamSlice(index, 0, 0, r))
            while start < size:
                while r < num_replicas - 1 and cuts[r] <= begin + start:
                    r += 1
                stop = min(size, cuts[r] - begin)
                slices.append(ParamSlice(index, start, stop, r))
                start = stop
            begin += size
    return slices


def plan_whole(
    sizes: Sequence[int], indices: Iterable[int], num_replicas: int
) -> list[ParamSlice]:
    """Plans whole parameters, for optimizers that are not elementwise."""
    loads = [(0, r) for r in range(num_replicas)]
    slices = []
    for index in sorted(indices, key=lambda i: -sizes[i]):
        load, r = heapq.heappop(loads)
        slices.append(ParamSlice(index, 0, sizes[index], r))
        heapq.heappush(loads, (load + sizes[index], r))
    return slices


def find_uncovered(slices: Sequence[ParamSlice], sizes: Sequence[int]) -> tuple[int, int] | None:
    """Returns the first parameter and element not covered by exactly one slice, or ``None``."""
    reached = [0] * len(sizes)
    for one in sorted(slices):
        if one.start != reached[one.param_index]:
            return one.param_index, min(one.start, reached[one.param_index])
        reached[one.param_index] = one.stop
    for index, size in enumerate(sizes):
        if reached[index] != size:
            return index, reached[index]
    return None


def shard_sizes(slices: Iterable[ParamSlice], num_replicas: int) -> list[int]:
    """Returns the number of elements that each replica updates."""
    elements = [0] * num_replicas
    for one in slices:
        elements[one.replica_id] += one.stop - one.start
    return elements
