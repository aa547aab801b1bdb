"""mirror/devices.py: every device name a user may write, on machines with any number of GPUs."""

import re
import threading

import numpy as np
import pytest
import torch
from torch import nn

import mirror
from mirror import devices
from mirror.devices import generators_of, resolve_places, separate_streams
from mirror.errors import DeviceError

CPU = torch.device("cpu")


def cuda(*indices):
    return tuple(torch.device("cuda", i) for i in indices)


@pytest.fixture
def visible(monkeypatch):
    """Gives ``visible(n)``: from then on ``n`` GPUs are visible."""
    return lambda n: monkeypatch.setattr(devices, "num_cuda_devices", lambda: n)


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_nothing_asked_for_gives_all_gpus_or_else_the_cpu(visible, nothing):
    visible(2)
    assert devices.resolve(nothing) == cuda(0, 1)
    visible(0)
    assert devices.resolve(nothing) == (CPU,)


@pytest.mark.parametrize(
    "name", ["cpu", "CPU", "cpu:0", "cpu:3", "CPU:0", "/cpu:0", "/device:CPU:1"]
)
def test_cpu_names_mean_the_one_cpu(visible, name):
    visible(0)
    assert devices.resolve([name]) == (CPU,)
    assert devices.resolve([name])[0].index is None


@pytest.mark.parametrize(
    "name", ["cuda:1", "CUDA:1", "GPU:1", "gpu:1", "/gpu:1", "/GPU:1", "/device:GPU:1"]
)
def test_tensorflow_names_mean_the_gpu_of_that_index(visible, name):
    visible(2)
    assert devices.resolve([name]) == cuda(1)


def test_a_gpu_without_index_is_the_first(visible):
    visible(2)
    assert devices.resolve(["cuda", "GPU", torch.device("cuda")]) == cuda(0, 0, 0)


def test_device_objects_stay_what_they_are_and_cpu_loses_its_index(visible):
    visible(2)
    assert devices.resolve(cuda(1, 0)) == cuda(1, 0)
    assert devices.resolve([torch.device("cpu", 1)]) == (CPU,)


def test_repeated_entries_stay(visible):
    visible(1)
    assert devices.resolve(["cpu"] * 4) == (CPU,) * 4
    assert devices.resolve(["cuda:0", "cuda:0"]) == cuda(0, 0)


def test_one_device_alone_is_a_list_of_one(visible):
    visible(1)
    assert devices.resolve("GPU:0") == cuda(0)
    assert devices.resolve(CPU) == (CPU,)


@pytest.mark.parametrize(
    "device",
    ["mps", "meta", "xpu:0", "garbage", "", "cuda:", "cuda:-1", "cuda:0,cuda:1", None, -1],
)
def test_an_unknown_device_is_named_with_what_is_visible(visible, device):
    visible(2)
    with pytest.raises(DeviceError) as error:
        devices.resolve(["cuda:0", device])
    assert f"got '{device}'" in str(error.value)
    assert "'cpu', 'cuda:0', 'cuda:1'" in str(error.value)
    assert "devices=['cpu'] * 4" in str(error.value)


@pytest.mark.parametrize("indices", [[1, 0], (1, 0), np.array([1, 0]), [np.int64(1), "cuda:0"]])
def test_numbers_in_a_list_are_gpus_by_index(visible, indices):
    visible(2)
    assert devices.resolve(indices) == cuda(1, 0)
    assert devices.resolve(range(2)) == cuda(0, 1)


def test_a_number_that_is_no_gpu_is_named(visible):
    visible(1)
    with pytest.raises(DeviceError, match=r"'cuda:3' does not exist; visible are 'cpu', 'cuda:0'"):
        devices.resolve([0, 3])
    with pytest.raises(DeviceError, match="got True"):
        devices.resolve([True])


def test_a_number_in_place_of_the_list_is_refused():
    with pytest.raises(
        DeviceError, match=r"got '2', a number; leave .* or pass \[2\] for the GPU"
    ):
        devices.resolve(2)
    with pytest.raises(DeviceError, match=r"'-1', a number; leave devices out .* or pass list\("):
        devices.resolve(-1)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
def test_a_model_in_place_of_the_devices_raises_and_names_its_place(model):
    with pytest.raises(DeviceError, match=r"a (Linear|Sequential), a model; .*mirror\(model\)"):
        devices.resolve(model)


def test_a_gpu_that_does_not_exist_is_never_replaced(visible):
    visible(1)
    with pytest.raises(DeviceError, match=r"'GPU:5' does not exist; visible are 'cpu', 'cuda:0'"):
        devices.resolve(["GPU:5"])
    visible(0)
    with pytest.raises(DeviceError, match=r"'cuda:0' does not exist; visible are 'cpu'; pass"):
        devices.resolve([torch.device("cuda:0")])


def test_cpu_and_gpu_do_not_go_together(visible):
    visible(1)
    with pytest.raises(DeviceError, match="all CPU or all CUDA; got 'cpu', 'GPU:0'"):
        devices.resolve(["cpu", "GPU:0"])


def test_only_cpu_devices_are_simulated():
    assert devices.is_simulated([CPU, CPU])
    assert not devices.is_simulated(cuda(0))


def test_replicas_on_one_device_are_not_distinct():
    assert devices.are_distinct(cuda(0, 1))
    assert devices.are_distinct([CPU])
    assert not devices.are_distinct(cuda(0, 1, 0))
    assert not devices.are_distinct([CPU, CPU])


def test_the_cpu_is_called_cpu_and_needs_no_synchronization():
    assert devices.model_name(CPU) == "cpu"
    with devices.using(CPU):
        devices.synchronize(CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_using_a_gpu_makes_it_current():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    with devices.using(last):
        assert torch.cuda.current_device() == last.index
        devices.synchronize(last)
    assert devices.model_name(last) == torch.cuda.get_device_name(last)


def test_backward_stays_in_the_calling_thread_on_gpus_only():
    assert torch._C._is_multithreading_enabled()
    with devices.backward_in_calling_thread([CPU]):
        assert torch._C._is_multithreading_enabled()
    with devices.backward_in_calling_thread(cuda(0)):
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_hook_of_a_gpu_tensor_runs_in_the_calling_thread():
    threads = []
    x = torch.ones(3, device="cuda:0", requires_grad=True)
    x.register_hook(lambda grad: threads.append(threading.get_ident()))
    with devices.backward_in_calling_thread(cuda(0)):
        x.sum().backward()
    assert threads == [threading.get_ident()]


def test_devices_seeded_equally_get_streams_of_their_own_from_the_one_seed():
    """``torch.manual_seed`` gives every GPU one seed; generators stand in for GPUs."""

    def draws(seed):
        generators = [torch.Generator().manual_seed(seed) for _ in range(3)]
        separate_streams(generators)
        separate_streams(generators)  # the second time there is nothing to do
        return [torch.rand(4, generator=g) for g in generators]

    first, again, other = draws(7), draws(7), draws(8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(first[0], torch.rand(4, generator=torch.Generator().manual_seed(7)))
    everything = [*first, *other]
    assert all(
        not torch.equal(a, b) for i, a in enumerate(everything) for b in everything[i + 1 :]
    )
    assert generators_of([torch.device("cpu")] * 3) == []


def test_generators_of_gpus_are_there_before_cuda_is_initialised(monkeypatch):
    # To ask how many GPUs there are initialises nothing, and till then there are none.
    made = [torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)]
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(
        torch.cuda, "init", lambda: monkeypatch.setattr(torch.cuda, "default_generators", made)
    )
    assert generators_of(cuda(1, 0)) == [made[1], made[0]]
    state = devices.random_state(cuda(0)[0])
    devices.set_random_state(cuda(1)[0], state)
    assert torch.equal(made[1].get_state(), state)


def test_a_device_with_its_own_seed_keeps_its_stream():
    generators = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(5)]
    separate_streams(generators)
    assert torch.equal(
        torch.rand(4, generator=generators[1]),
        torch.rand(4, generator=torch.Generator().manual_seed(5)),
    )


@pytest.mark.parametrize(
    "several", [[["cpu", "cpu"], ["cpu", "cpu"]], [("cuda:0", "cuda:1")], ["cpu", ["cpu"]]]
)
@pytest.mark.parametrize(
    "kind", [mirror.CentralStorageStrategy, mirror.MultiWorkerMirroredStrategy]
)
def test_a_replica_with_several_devices_is_refused_with_a_remedy(kind, several):
    with pytest.raises(mirror.DeviceError, match=r"one entry per replica.*fully_shard") as raised:
        kind(several)
    assert repr(several[-1])[1:-1] in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["cpu", "cpu:1"], [(CPU,), (CPU,)]),
        ([["cpu"], ["cpu"]], [(CPU,), (CPU,)]),
        ([["cpu", "cpu:1"], ("CPU:0", "cpu")], [(CPU, CPU)] * 2),
        ([["cuda:0", 1], ["GPU:2", "/gpu:3"]], [cuda(0, 1), cuda(2, 3)]),
        (["cuda:1", "cuda:1"], [cuda(1), cuda(1)]),
        ([["cuda:1"], ["cuda:1"]], [cuda(1), cuda(1)]),
        ([[torch.device("cuda:3"), "cuda"]], [cuda(3, 0)]),
    ],
)
def test_a_list_for_each_replica_names_its_devices_in_order(rows, expected, visible):
    visible(4)
    assert resolve_places(rows) == tuple(expected)


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([["cuda:0", "cuda:1"], ["cuda:2"]], "with 2, 1; give every replica"),
        ([["cpu", "cpu"], []], "with 2, 0; give every replica"),
        ([[], []], "with 0, 0; give every replica"),
        ([["cuda:0", "cuda:1"], "cuda:2"], "of both kinds"),
        (["cpu", ["cpu"]], "of both kinds"),
        ([["cuda:0", "cuda:0"]], "'cuda:0' is twice; name each GPU once"),
        ([["cuda:0", "cuda:1"], ["cuda:1", "cuda:2"]], "'cuda:1' is twice; name each GPU once"),
        ([["cuda:0", "cpu"]], "all CPU or all CUDA"),
        ([["cuda:0", "cuda:1"], ["cuda:2", "cuda:9"]], "'cuda:9' does not exist"),
        ([[["cpu"]]], "several for one replica"),
        ([["cpu", None]], "a device is 'cpu' or one like 'cuda:0'; got 'None'"),
    ],
)
def test_lists_that_are_no_places_are_refused(rows, what, visible):
    visible(4)
    with pytest.raises(mirror.DeviceError, match=re.escape(what)):
        resolve_places(rows)


STATES_IN_THREADS = """
import gc, os, sys, threading, torch
from mirror.devices import generator_state
generator = torch.default_generator
base = torch.ones(3, requires_grad=True)
gc.set_threshold(5)
def work():
    for _ in range(100):
        gc.disable()
        for _ in range(20):  # garbage, to be collected where the state is read
            cycle = [base[:2]]
            cycle.append(cycle)
        del cycle
        gc.enable()
        generator.set_state(generator_state(generator))
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert gc.isenabled()
gc.disable()
generator_state(generator)
assert not gc.isenabled()
"""


def test_threads_read_the_state_of_a_generator_while_garbage_is_collected(script_pool):
    """torch's own reading stops the whole process there: see ``generator_state``."""
    done = script_pool.run(STATES_IN_THREADS)
    assert (done.returncode, done.stderr) == (0, "")
