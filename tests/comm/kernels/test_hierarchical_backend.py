"""kernel_backends.py and topology.py: islands, found or given."""

import pytest
import torch

from mirror import comm
from mirror.comm.topology import group, islands_of, unreachable_pair

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("n", "islands"),
    [
        (1, ((0,),)),
        (2, ((0, 1),)),
        (5, ((0, 1, 2, 3, 4),)),
        (4, ((0, 1), (2, 3))),
        (6, ((0, 1, 2), (3, 4, 5))),
    ],
)
def test_simulated_devices_are_two_halves(n, islands):
    assert islands_of([CPU] * n) == islands
    assert comm.create("hierarchical", ["cpu"] * n).islands == islands


@pytest.mark.parametrize(
    "islands", [[[0, 3], [5, 1], [4, 2]], [[0, 1, 2, 3, 4, 5]], [[i] for i in range(6)]], ids=str
)
def test_given_islands_reduce_gather_and_broadcast(islands):
    communicator = comm.create("hierarchical", ["cpu"] * 6, islands=islands)
    for size in (1, 5, 6, 7, 100_003):
        tensors = [torch.full((size,), i + 1.0) for i in range(6)]
        communicator.reduce_scatter(tensors)
        communicator.all_gather(tensors)
        assert all(bool((tensor == 21).all()) for tensor in tensors)
        for root in range(6):
            tensors = [torch.full((size,), float(i)) for i in range(6)]
            communicator.broadcast(tensors, root)
            assert all(bool((tensor == root).all()) for tensor in tensors)


def test_the_order_is_replicas_inside_islands_then_islands():
    # In float32, 2**24 + 1 is 2**24: what comes first, matters.
    big, small = 2.0**24, 1.0
    values = [big, small, small, -big]
    apart = comm.create("hierarchical", ["cpu"] * 4, islands=[[0, 3], [1, 2]])
    tensors = [torch.tensor([value]) for value in values]
    apart.all_reduce(tensors)
    assert tensors[0].tolist() == [2]
    mixed = comm.create("hierarchical", ["cpu"] * 4, islands=[[0, 1], [2, 3]])
    tensors = [torch.tensor([value]) for value in values]
    mixed.all_reduce(tensors)
    assert tensors[0].tolist() == [big + (small - big)]


@pytest.mark.parametrize(
    ("islands", "match"),
    [
        ([[0, 1], [2]], "each of the replicas 0 to 3 once"),
        ([[0, 1], [1, 2]], "each of the replicas 0 to 3 once"),
        ([[0, 1, 2], [3]], "equal size"),
        ([[0, 1, 2, 3], []], "equal size"),
    ],
)
def test_islands_that_do_not_fit_are_refused(islands, match):
    with pytest.raises(ValueError, match=match):
        comm.create("hierarchical", ["cpu"] * 4, islands=islands)


def test_replicas_are_grouped_by_chains_of_neighbours():
    links = {(0, 3), (3, 1), (2, 4)}
    found = group(5, lambda i, j: (i, j) in links or (j, i) in links)
    assert found == ((0, 1, 3), (2, 4))


def test_a_pair_without_peer_access_is_found(monkeypatch):
    devices = [torch.device("cuda", i) for i in range(3)]
    pairs = [(a, b) for a in devices for b in devices]
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: b.index != 2)
    assert unreachable_pair(pairs) == (devices[0], devices[2])
    assert unreachable_pair(pairs[:2]) is None


GPUS = [torch.device("cuda", i) for i in range(4)]


@pytest.mark.parametrize(
    ("linked", "nodes", "islands"),
    [
        ({(0, 1), (2, 3)}, [None] * 4, ((0, 1), (2, 3))),
        (set(), [0, 0, 1, 1], ((0, 1), (2, 3))),
        (set(), [0, 0, 0, 1], ((0, 1, 2, 3),)),
        (set(), [None] * 4, ((0, 1, 2, 3),)),
        ({(0, 1)}, [0, 0, 1, 1], ((0, 1, 2, 3),)),
    ],
)
def test_islands_of_gpus_come_from_links_then_numa_nodes(monkeypatch, linked, nodes, islands):
    links = linked | {(j, i) for i, j in linked} | {(i, i) for i in range(4)}
    monkeypatch.setattr("mirror.comm.topology._are_linked", lambda i, j: (i, j) in links)
    monkeypatch.setattr("mirror.comm.topology._numa_node", lambda i: nodes[i])
    assert islands_of(GPUS) == islands
