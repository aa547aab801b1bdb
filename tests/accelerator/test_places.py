"""Places: what a device means to each replica. Programs on them: tests/gpu/test_places.py."""

import pytest
import torch

import mirror
from mirror.accelerator.places import Places

CPU = torch.device("cpu")
A, B, C, D, E = (torch.device("cuda", i) for i in range(5))


def test_a_device_tells_its_position_and_the_replicas_devices_there():
    places = Places([(A, B), (C, D)])
    assert places.are_several
    assert places.devices == (A, B, C, D)
    assert [places.at(device) for device in (A, B, C, D)] == [(A, C), (B, D), (A, C), (B, D)]
    assert places.at(CPU) == places.at(E) == (A, C)
    assert places.names(1) == {A: C, B: D}
    assert str(places) == "[cuda:0, cuda:1], [cuda:2, cuda:3]"


def test_what_a_device_means_beside_another_is_its_own_replicas():
    places = Places([(A, B), (C, D)])
    assert [places.beside(B, one) for one in (A, B, C, D)] == [B, B, D, D]
    assert places.beside(C, B) == A
    assert places.beside(CPU, C) == CPU
    assert places.beside(E, C) == E


@pytest.mark.parametrize("rows", [[(A,), (C,)], [(CPU, CPU), (CPU, CPU)], [(A,), (A,)]])
def test_lone_devices_and_simulated_ones_are_one_position(rows):
    places = Places(rows)
    firsts = tuple(row[0] for row in rows)
    assert not places.are_several
    assert places.columns == (firsts,)
    assert places.at(rows[1][0]) == places.at(E) == firsts
    assert places.home_of(E, "w") == rows[0][0]
    assert places.beside(E, rows[1][0]) == E


def test_a_variable_is_at_home_on_the_first_replicas_devices_alone():
    places = Places([(A, B), (C, D)])
    assert (places.home_of(A, "w"), places.home_of(B, "w")) == (A, B)
    assert places.home_of(CPU, "w") == A
    for stranger in (C, D, E):
        with pytest.raises(mirror.DeviceError, match=rf"'w' is on {stranger}; move it to one of"):
            places.home_of(stranger, "w")
