"""Places: what a device means to each replica. Programs on them: tests/gpu/test_places.py."""

import pytest
import torch

import mirror
from mirror.device.device_mesh import DeviceMesh

CPU = torch.device("cpu")
A, B, C, D, E = (torch.device("cuda", i) for i in range(5))


def test_a_device_tells_its_position_and_the_replicas_devices_there():
    places = DeviceMesh([(A, B), (C, D)])
    assert places.is_model_parallel
    assert places.devices == (A, B, C, D)
    assert [places.replica_at(device) for device in (A, B, C, D)] == [
        (A, C),
        (B, D),
        (A, C),
        (B, D),
    ]
    assert places.replica_at(CPU) == places.replica_at(E) == (A, C)
    assert places.names(1) == {A: C, B: D}
    assert str(places) == "[cuda:0, cuda:1], [cuda:2, cuda:3]"


def test_what_a_device_means_beside_another_is_its_own_replicas():
    places = DeviceMesh([(A, B), (C, D)])
    assert [places.translate(B, one) for one in (A, B, C, D)] == [B, B, D, D]
    assert places.translate(C, B) == A
    assert places.translate(CPU, C) == CPU
    assert places.translate(E, C) == E


@pytest.mark.parametrize("rows", [[(A,), (C,)], [(CPU, CPU), (CPU, CPU)], [(A,), (A,)]])
def test_lone_devices_and_simulated_ones_are_one_position(rows):
    places = DeviceMesh(rows)
    firsts = tuple(row[0] for row in rows)
    assert not places.is_model_parallel
    assert places.positions == (firsts,)
    assert places.replica_at(rows[1][0]) == places.replica_at(E) == firsts
    assert places.position_of(E, "w") == rows[0][0]
    assert places.translate(E, rows[1][0]) == E


def test_a_variable_is_at_home_on_the_first_replicas_devices_alone():
    places = DeviceMesh([(A, B), (C, D)])
    assert (places.position_of(A, "w"), places.position_of(B, "w")) == (A, B)
    assert places.position_of(CPU, "w") == A
    for stranger in (C, D, E):
        with pytest.raises(mirror.DeviceError, match=rf"'w' is on {stranger}; move it to one of"):
            places.position_of(stranger, "w")
