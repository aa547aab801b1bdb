"""Device meshes and device remapping; programs on them: tests/gpu/test_places.py."""

import pytest
import torch

import mirror
from mirror.device.device_mesh import DeviceMesh, DeviceRemap, disabling_remap
from mirror.errors import CompileError

CPU = torch.device("cpu")
A, B, C, D, E = (torch.device("cuda", i) for i in range(5))


def test_a_device_gives_its_position_and_its_peers():
    places = DeviceMesh([(A, B), (C, D)])
    assert places.is_model_parallel
    assert places.devices == (A, B, C, D)
    assert [places.peers_of(device) for device in (A, B, C, D)] == [
        (A, C),
        (B, D),
        (A, C),
        (B, D),
    ]
    assert places.peers_of(CPU) == places.peers_of(E) == (A, C)
    assert places.names(1) == {A: C, B: D}
    assert str(places) == "[cuda:0, cuda:1], [cuda:2, cuda:3]"


def test_a_device_is_translated_to_that_of_the_same_replica():
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
    assert places.peers_of(rows[1][0]) == places.peers_of(E) == firsts
    assert places.home_of(E, "w") == rows[0][0]
    assert places.translate(E, rows[1][0]) == E


def test_a_variable_has_a_device_of_the_first_replica():
    places = DeviceMesh([(A, B), (C, D)])
    assert (places.home_of(A, "w"), places.home_of(B, "w")) == (A, B)
    assert places.home_of(CPU, "w") == A
    for stranger in (C, D, E):
        with pytest.raises(mirror.DeviceError, match=rf"'w' is on {stranger}; move it to one of"):
            places.home_of(stranger, "w")


META, XPU = torch.device("meta"), torch.device("xpu", 1)  # of which there is none here
REFUSED = pytest.raises((AssertionError, RuntimeError))


def renaming(wanted=lambda: True):
    return DeviceRemap({XPU: META}, wanted)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to("xpu:1"),
        lambda x: x.to(XPU),
        lambda x: x.to(device="xpu:1"),
        lambda x: x.to(XPU, torch.float64),
        lambda x: x.to("xpu:1", non_blocking=True),
        lambda x: torch.zeros(2, device="xpu:1"),
        lambda x: torch.zeros_like(x, device=XPU),
        lambda x: torch.arange(3, device=XPU),
        lambda x: torch.empty_strided((2,), (1,), device="xpu:1"),
        lambda x: x.new_ones(2, device="xpu:1"),
        lambda x: torch.nn.Linear(2, 2, device="xpu:1").weight,
        lambda x: torch.nn.Linear(2, 2).to("xpu:1").bias,
    ],
)
def test_every_way_to_name_a_device_means_the_replicas_own(make):
    x = torch.ones(2)
    with renaming():
        assert make(x).device == META
        with torch.device("xpu:1"):
            assert torch.zeros(2).device == META
    with REFUSED:
        make(x)


def test_what_is_no_device_or_no_name_stays():
    x = torch.ones(2, 2)
    with renaming():
        assert x.to(torch.float64).dtype == torch.float64
        assert torch.equal(torch.einsum("ij,jk->ik", x, x), 2 * x)
        assert x.sum(1).shape == x.new_empty(2).shape == (2,)
        assert x.to("meta").device == META
        assert x.to("cpu").device == x.device
        assert torch.full((1,), 1).item() == 1
        assert x.to(x).shape == x.shape


def test_a_number_is_a_device_where_devices_go():
    seen = []

    def to(*args, **kwargs):
        seen.append((args, kwargs))

    mode = renaming()
    mode.__torch_function__(to, (), ("x", 1))
    mode.__torch_function__(lambda *args, **kwargs: to(*args, **kwargs), (), ("x", 1))
    mode.__torch_function__(to, (), ("x",), {"device": 1, "dim": 1})
    mode.__torch_function__(to, (), ("x", True))
    assert seen == [
        (("x", META), {}),
        (("x", 1), {}),
        (("x",), {"device": META, "dim": 1}),
        (("x", True), {}),
    ]


def test_devices_are_what_they_are_where_that_is_not_wanted():
    x, wanted = torch.ones(2), [True]
    with renaming(lambda: wanted[0]):
        with disabling_remap(), REFUSED:
            x.to("xpu:1")
        assert x.to("xpu:1").device == META
        wanted[0] = False
        with REFUSED:
            x.to("xpu:1")


def test_what_is_compiled_is_refused(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with renaming(), pytest.raises(CompileError, match="several of its own; leave the model"):
        torch.zeros(2)
