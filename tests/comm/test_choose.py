"""mirror/comm/choose.py: names, reasons, and what "auto" means."""

import pytest
import torch

from mirror import comm
from mirror.comm import choose
from mirror.comm.naive import NaiveCommunicator
from mirror.errors import BackendError, DeviceError


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(choose, "_registered", dict(choose._registered))


CPU = ("direct", "hierarchical", "host", "naive", "ring")


def test_the_cpu_is_served_by_all_that_simulate():
    assert comm.available(["cpu", "cpu"]) == CPU


def test_auto_means_host_on_the_cpu_and_naive_on_gpus_without_cupy(monkeypatch):
    assert choose.choose(["cpu"]) == "host"
    monkeypatch.setattr("mirror.devices.num_cuda_devices", lambda: 2)
    monkeypatch.setattr("mirror.comm.cuda_kernels.find_spec", lambda name: None)
    assert choose.choose(["cuda:0", "cuda:1"]) == "naive"
    assert comm.available(["cuda:0"] * 2) == ("naive",)
    with pytest.raises(BackendError, match="'ring' cannot serve cuda:0: it needs CuPy"):
        comm.create("ring", ["cuda:0"])


def test_gpus_that_passed_the_trial_of_the_kernels_can_be_served_by_them(monkeypatch):
    """ "auto" does not choose them before they have run on a GPU."""
    monkeypatch.setattr("mirror.devices.num_cuda_devices", lambda: 2)
    monkeypatch.setattr("mirror.comm.cuda_kernels.missing_reason", lambda pairs: None)
    monkeypatch.setattr("mirror.comm.kernels._trial", lambda cls, devices: None)
    assert "direct" in comm.available(["cuda:0", "cuda:1"])
    assert choose.choose(["cuda:0", "cuda:1"]) == "naive"
    monkeypatch.setattr("mirror.comm.kernels._trial", lambda cls, devices: "its trial failed")
    assert comm.available(["cuda:0", "cuda:1"]) == ("naive",)


def test_created_communicators_know_name_and_devices():
    communicator = comm.create("host", ["CPU:0"] * 2)
    assert communicator.name == "host"
    assert communicator.devices == (torch.device("cpu"),) * 2


def test_an_unknown_name_is_refused_with_the_available_ones():
    with pytest.raises(
        BackendError,
        match=r"'gloo' cannot serve cpu: there is no backend .*one of direct, .*, ring",
    ):
        comm.create("gloo", ["cpu"])


@pytest.mark.parametrize("name", ["nccl"])
def test_a_planned_backend_is_not_part_of_this_version(name):
    with pytest.raises(BackendError, match=f"'{name}' .* not part of this version"):
        comm.create(name, ["cpu"])


def test_a_backend_that_cannot_serve_gives_its_reason(monkeypatch):
    monkeypatch.setattr("mirror.devices.num_cuda_devices", lambda: 1)
    with pytest.raises(
        BackendError, match=r"'host' cannot serve cuda:0, cuda:0: it serves CPU .* one of naive"
    ):
        comm.create("host", ["cuda:0"] * 2)


def test_a_device_that_does_not_exist_is_a_device_error():
    for call in (comm.available, choose.choose, lambda devices: comm.create("naive", devices)):
        with pytest.raises(DeviceError, match="'cuda:99'"):
            call(["cuda:99"])


def test_a_registered_class_is_available_and_gets_its_options(registry):
    @comm.register("mine")
    class Mine(NaiveCommunicator):
        def __init__(self, devices, speed=1):
            super().__init__(devices)
            self.speed = speed

        @classmethod
        def unavailable_reason(cls, devices):
            return "it likes pairs" if len(devices) != 2 else None

    assert comm.available(["cpu"] * 2) == tuple(sorted([*CPU, "mine"]))
    assert comm.available(["cpu"]) == CPU
    communicator = comm.create("mine", ["cpu"] * 2, speed=3)
    assert isinstance(communicator, Mine)
    assert (communicator.name, communicator.speed) == ("mine", 3)
    assert NaiveCommunicator.name == "naive"
    with pytest.raises(BackendError, match="it likes pairs"):
        comm.create("mine", ["cpu"])


@pytest.mark.parametrize("name", ["host", "auto"])
def test_a_name_that_is_taken_is_refused(registry, name):
    class Mine(NaiveCommunicator):
        pass

    with pytest.raises(ValueError, match=f"must be new; '{name}' already is"):
        comm.register(name)(Mine)
    assert Mine.name == "Mine"


def test_only_communicators_can_be_registered(registry):
    with pytest.raises(TypeError, match=r"subclass of mirror\.comm\.Communicator"):
        comm.register("mine")(int)
