"""mirror/comm/registry.py and communicator.py: names, reasons, and a user's own communicator."""

import pytest
import torch

from mirror import comm
from mirror.comm import registry as choose
from mirror.comm.host_backends import NaiveCommunicator
from mirror.errors import BackendError, DeviceError


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(choose, "_registered", dict(choose._registered))


CPU = ("direct", "hierarchical", "host", "naive", "ring")


def test_the_cpu_is_served_by_all_that_simulate():
    assert comm.available(["cpu", "cpu"]) == CPU


def test_gpus_without_libraries_are_served_by_copies(monkeypatch):
    monkeypatch.setattr("mirror.devices.num_cuda_devices", lambda: 2)
    monkeypatch.setattr("mirror.comm.kernels.cuda_kernels.find_spec", lambda name: None)
    monkeypatch.setattr(
        "mirror.comm.nccl.libnccl.nccl_missing_reason", lambda: "there is no libnccl"
    )
    assert comm.available(["cuda:0"] * 2) == ("naive",)
    with pytest.raises(BackendError, match="'ring' cannot serve cuda:0: it needs CuPy"):
        comm.create("ring", ["cuda:0"])
    with pytest.raises(BackendError, match="'nccl' cannot serve cuda:0: there is no libnccl"):
        comm.create("nccl", ["cuda:0"])


def test_gpus_are_served_by_what_passes_its_self_test_on_them(monkeypatch):
    monkeypatch.setattr("mirror.devices.num_cuda_devices", lambda: 2)
    monkeypatch.setattr(
        "mirror.comm.kernels.cuda_kernels.kernels_missing_reason", lambda pairs: None
    )
    monkeypatch.setattr("mirror.comm.nccl.libnccl.nccl_missing_reason", lambda: None)
    failures = {"direct": None, "ring": "a bit is wrong", "hierarchical": "slow", "nccl": None}
    both = torch.device("cuda", 0), torch.device("cuda", 1)
    found = {(choose.check_name(name), both): how for name, how in failures.items()}
    monkeypatch.setattr(choose.self_test, "_results", found)
    assert comm.available(["cuda:0", "cuda:1"]) == ("direct", "naive", "nccl")
    with pytest.raises(BackendError, match="'ring' cannot serve cuda:0, cuda:1: a bit is wrong"):
        comm.create("ring", ["cuda:0", "cuda:1"])


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


def test_a_backend_that_cannot_serve_gives_its_reason(monkeypatch):
    monkeypatch.setattr("mirror.devices.num_cuda_devices", lambda: 1)
    monkeypatch.setattr(
        "mirror.comm.nccl.libnccl.nccl_missing_reason", lambda: "there is no libnccl"
    )
    with pytest.raises(
        BackendError, match=r"'host' cannot serve cuda:0, cuda:0: it serves CPU .* one of naive"
    ):
        comm.create("host", ["cuda:0"] * 2)


def test_a_device_that_does_not_exist_is_a_device_error():
    for call in (comm.available, lambda devices: comm.create("naive", devices)):
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


def test_reasons_are_given_for_names_of_devices(monkeypatch):
    for name in choose.names():
        by_name = comm.unavailable_reason(name, ["cpu", "CPU:0"])
        assert by_name == comm.unavailable_reason(name, [torch.device("cpu")] * 2)
        assert (by_name is None) == (name in comm.available(["cpu"] * 2))
        kind = choose.check_name(name)
        assert kind.unavailable_reason(["cpu"] * 2) == by_name
    assert comm.unavailable_reason("host", ["GPU:0"]) == "it serves CPU devices only"
    with pytest.raises(DeviceError, match="got 'tpu'"):
        comm.unavailable_reason("host", ["tpu"])


@pytest.mark.parametrize("name", comm.available(["cpu"] * 2))
@pytest.mark.parametrize("op", [[torch.full((999,), 7.25)], torch.full((999,), 7.25), None, 3])
def test_an_op_that_is_none_is_named_without_its_data(name, op):
    communicator = comm.create(name, ["cpu"] * 2)
    with pytest.raises(ValueError, match="op must be one of sum") as error:
        communicator.all_reduce([torch.ones(1), torch.ones(1)], op)
    assert "7.25" not in str(error.value)


class Recorder(comm.Communicator):
    """Sums in the simplest way and records what it was called with."""

    def __init__(self, devices):
        super().__init__(devices)
        self.sizes = []

    def all_reduce(self, tensors, op="sum", scale=1.0):
        self.sizes.append(tensors[0].numel())
        assert all(tensor.is_contiguous() for tensor in tensors)
        total = torch.stack(list(tensors)).sum(0) * scale
        for tensor in tensors:
            tensor.copy_(total)

    def broadcast(self, tensors, root=0):
        raise NotImplementedError

    def reduce_scatter(self, tensors, op="sum"):
        raise NotImplementedError

    def all_gather(self, tensors):
        raise NotImplementedError


class Independent(Recorder):
    """Keeps its own state and calls nothing of the base class."""

    def __init__(self, devices):
        self.devices = tuple(torch.device(device) for device in devices)
        self.sizes = []

    def close(self):
        pass


@pytest.mark.parametrize("kind", [Recorder, Independent])
def test_a_users_communicator_reduces_lists_in_packs(kind):
    communicator = kind(["cpu", "cpu"])
    lists = [[torch.full((i + 1,), float(i)) for i in range(4)] for _ in range(2)]
    communicator.all_reduce_lists(lists, scale=0.5, bytes_per_pack=12)
    assert communicator.sizes == [3, 3, 4]
    for column in lists:
        assert [tensor.tolist() for tensor in column] == [[0], [1] * 2, [2] * 3, [3] * 4]


def test_one_contiguous_tensor_travels_without_a_copy():
    communicator = Recorder(["cpu", "cpu"])
    seen = []
    communicator.all_reduce = lambda tensors, op, scale: seen.extend(tensors)
    one, other = torch.ones(3), torch.ones(3)
    communicator.all_reduce_lists([[one], [other]])
    assert seen[0] is one
    assert seen[1] is other


def test_a_class_that_lacks_a_collective_cannot_be_made():
    class Incomplete(comm.Communicator):
        def all_reduce(self, tensors, op="sum", scale=1.0):
            pass

    with pytest.raises(TypeError, match="all_gather"):
        Incomplete(["cpu"])


def test_a_communicator_is_named_after_its_class_until_registered():
    assert Recorder(["cpu"]).name == "Recorder"
    assert comm.create("naive", ["cpu"]).name == "naive"


def test_devices_are_resolved():
    assert Recorder(["CPU:0", "cpu:1"]).devices == (torch.device("cpu"),) * 2
