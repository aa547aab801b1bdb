"""What the constructors of strategies take and refuse, and a user's own communicators."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same
from tests.programs.cases import CASES, WAYS, compare, make_batches, prepared
from tests.strategy.programs import ids, values
from tests.toy_models import replica_id


def test_devices_default_to_what_is_visible():
    for devices in (None, []):
        with mirror.MirroredStrategy(devices) as strategy:
            visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
            expected = [torch.device("cuda", i) for i in range(visible)] or [torch.device("cpu")]
            assert list(strategy.devices) == expected
            assert isinstance(strategy.devices, tuple)
            assert strategy.num_replicas_in_sync == len(expected)


@pytest.mark.parametrize(
    "devices",
    [
        ["cpu", "cpu"],
        ["cpu:0", "cpu:1"],
        ["CPU:0", "/cpu:1"],
        [torch.device("cpu"), "cpu:7"],
        ("/CPU:0", "Cpu"),
    ],
)
def test_every_spelling_of_cpu_is_a_simulated_device(devices):
    with mirror.MirroredStrategy(devices) as strategy:
        assert strategy.num_replicas_in_sync == 2
        assert {d.type for d in strategy.devices} == {"cpu"}
        assert all(isinstance(d, torch.device) for d in strategy.devices)
        assert values(strategy, ids(strategy)) == [0.0, 1.0]


@pytest.mark.parametrize("name", ["cuda:77", "GPU:77", "/gpu:77", "nonsense", "tpu:0"])
def test_a_device_that_does_not_exist_is_named(name):
    with pytest.raises(mirror.DeviceError, match="77" if "77" in name else name):
        mirror.MirroredStrategy([name])
    assert issubclass(mirror.DeviceError, ValueError)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["GPU:0", "/gpu:0", "cuda:0", "gpu:0"])
def test_every_spelling_of_gpu_is_understood(name):
    with mirror.MirroredStrategy([name]) as strategy:
        assert strategy.devices == (torch.device("cuda", 0),)


def test_cpu_mixed_with_cuda_is_an_error():
    with pytest.raises(mirror.DeviceError):
        mirror.MirroredStrategy(["cpu", "cuda:0"])


@pytest.mark.parametrize("backend", ["nccl", "nonsense"])
def test_a_backend_that_cannot_serve_the_devices_is_an_error_with_the_reason(backend):
    with pytest.raises(mirror.BackendError, match=backend):
        mirror.MirroredStrategy(["cpu"] * 2, backend=backend)
    assert issubclass(mirror.BackendError, RuntimeError)


def test_auto_chooses_an_available_backend_and_names_it(strategy):
    assert strategy.backend in mirror.comm.available(strategy.devices)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "nonsense"},
        {"gradient_reduction": "max"},
        {"gradient_reduction": "Mean of all"},
    ],
)
def test_unknown_options_are_value_errors(options):
    with pytest.raises(ValueError, match=next(iter(options.values()))):
        mirror.MirroredStrategy(["cpu"], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"bytes_per_pack": -1},
        {"bytes_per_pack": 1.5},
        {"bytes_per_pack": "25 MB"},
        {"timeout_seconds": -1.0},
        {"timeout_seconds": "1"},
        {"timeout_seconds": float("nan")},
        {"deterministic": "yes"},
        {"wire_dtype": "nonsense"},
        {"wire_dtype": torch.complex64},
    ],
)
def test_bad_communication_options_are_value_errors_at_construction(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        mirror.CommunicationOptions(**options)


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 100, 25 * 2**20])
def test_the_size_of_a_pack_changes_no_value(bytes_per_pack, make_strategy):
    options = mirror.CommunicationOptions(bytes_per_pack=bytes_per_pack)
    strategy = make_strategy(3, communication_options=options)

    def fn():
        tensors = [torch.full((n,), replica_id() + 1.0) for n in (0, 1, 33, 200)]
        return mirror.get_replica_context().all_reduce("sum", tensors)

    for result in strategy.local_results(strategy.run(fn)):
        assert_same(result, [torch.full((n,), 6.0) for n in (0, 1, 33, 200)])


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        mirror.MirroredStrategy(["cpu"], "auto", mirror.CommunicationOptions())


def test_a_communicator_of_the_users_own_is_used(make_strategy):
    calls = []

    class Slow(mirror.comm.Communicator):
        def all_reduce(self, tensors, op="sum", scale=1.0):
            calls.append(len(tensors))
            assert op == "sum"
            total = torch.stack(list(tensors)).sum(0)
            if scale != 1.0:
                total *= scale
            for t in tensors:
                t.copy_(total)

        def broadcast(self, tensors, root=0):
            for t in tensors:
                t.copy_(tensors[root])

        def reduce_scatter(self, tensors, op="sum"):
            raise NotImplementedError

        def all_gather(self, tensors):
            raise NotImplementedError

        @classmethod
        def unavailable_reason(cls, devices):
            return None

        def close(self):
            calls.append("closed")

    devices = [torch.device("cpu")] * 3
    strategy = make_strategy(3, backend=Slow(devices))
    plain = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    for m in (plain, model):
        m(torch.ones(7, 2) * torch.arange(7.0)[:, None]).square().mean().backward()
    assert_same(model.weight.grad, plain.weight.grad)
    assert 3 in calls


def test_the_error_tree():
    tree = {
        "DeviceError": ValueError,
        "BackendError": RuntimeError,
        "StrategyError": RuntimeError,
        "StructureError": ValueError,
        "BatchError": ValueError,
        "ShapeError": ValueError,
        "DivergenceError": RuntimeError,
        "CollectiveTimeoutError": TimeoutError,
        "ReplicaMismatchError": RuntimeError,
    }
    for name, base in tree.items():
        error = getattr(mirror, name)
        assert issubclass(error, mirror.MirrorError)
        assert issubclass(error, base)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_equals_one_device(way):
    case = CASES["clipped-norm-adamw"]
    plain, model, _ = prepared(case)
    with mirror.OneDeviceStrategy("cpu") as strategy:
        strategy.mirror(model)
        batches = make_batches(case, [3, 1])
        compare(case, way, strategy, model, case.optimizer(model), plain, batches)


def test_model_input_and_results_are_on_its_device():
    with mirror.OneDeviceStrategy(torch.device("cpu"), guards=mirror.Guards()) as strategy:
        assert strategy.num_replicas_in_sync == 1
        assert strategy.devices == (torch.device("cpu"),)
        assert values(strategy, strategy.run(replica_id)) == [0.0]
        with strategy.scope():
            model = nn.Linear(2, 1)
        (batch,) = strategy.distribute_dataset([torch.ones(4, 2)])
        result = strategy.reduce("sum", strategy.run(model, args=(batch,)), axis=0)
        assert {t.device for t in (*model.parameters(), result)} == {torch.device("cpu")}
        assert repr(strategy).startswith("OneDeviceStrategy([cpu]")


@pytest.mark.parametrize("device", [["cpu", "cpu"], None, "cuda:77", 77, "meta", nn.Linear(1, 1)])
def test_what_is_not_one_device_is_refused(device):
    with pytest.raises(mirror.DeviceError):
        mirror.OneDeviceStrategy(device)
