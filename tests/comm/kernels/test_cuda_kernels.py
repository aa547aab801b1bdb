"""cuda_kernels.py: its calls of torch and CuPy, on fakes; and the kernels, on a GPU."""

import gc
import sys
from collections import Counter
from contextlib import contextmanager
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch

from mirror import comm
from mirror.comm import collective_lock
from mirror.comm.kernels import cuda_kernels, kernel_backends
from mirror.comm.kernels.cuda_kernels import Unit, unit_of, unit_source
from mirror.comm.kernels.launcher import ABORTED, KernelArguments

NAMES = ("direct", "ring", "hierarchical")


class Stream:
    cuda_stream = 77


class FakeGpus:
    """What CudaDevices asks of torch.cuda and of CuPy: notes what it is asked; does nothing."""

    def __init__(self, monkeypatch, processors=100):
        self.peers, self.launches, self.loaded, self.synchronized = [], [], [], []
        self.here, self.kept, self.functions, self.threads = None, [], [], []
        self.local_bytes = {}
        properties = SimpleNamespace(multi_processor_count=processors)
        for name, value in {
            "get_device_properties": lambda device: properties,
            "get_device_capability": lambda device: (9, device.index),
            "can_device_access_peer": lambda one, other: True,
            "current_stream": lambda device: Stream,
            "synchronize": self.synchronized.append,
            "device": self.device,
            "Event": lambda: SimpleNamespace(record=lambda stream: None, query=lambda: True),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "zeros", self.on_the_host(torch.zeros))
        monkeypatch.setattr(torch, "ones", lambda size, device: SimpleNamespace(to=str))
        runtime = SimpleNamespace(deviceEnablePeerAccess=self.enable, CUDARuntimeError=OSError)
        cuda = SimpleNamespace(runtime=runtime)
        cupy = SimpleNamespace(cuda=cuda, RawModule=self.module)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(cuda_kernels, "binary", lambda unit, capability: (unit, capability))
        monkeypatch.setattr(
            cuda_kernels, "compile_all", lambda *what: setattr(self, "compiled", what)
        )
        monkeypatch.setattr(cuda_kernels, "launch", self.launch)
        monkeypatch.setattr(cuda_kernels, "kernels_missing_reason", lambda pairs: None)
        monkeypatch.setattr(kernel_backends, "is_simulated", lambda devices: False)
        monkeypatch.setattr("mirror.comm.communicator.resolve", tuple)
        cuda_kernels._load.cache_clear()

    @contextmanager
    def device(self, device):
        before, self.here = self.here, device
        yield
        self.here = before

    def enable(self, index):
        self.peers.append((self.here.index, index))

    def on_the_host(self, make):
        def make_on_cpu(*shape, device=None, pin_memory=False, **options):
            if pin_memory:
                assert torch.device(device).type == "cpu"
            return make(*shape, device="cpu", **options)

        return make_on_cpu

    def module(self, path):
        self.loaded.append(path)

        def function(name):
            self.functions.append(name)
            handle = SimpleNamespace(ptr=len(self.functions) - 1)
            return SimpleNamespace(local_size_bytes=self.local_bytes.get(name, 0), kernel=handle)

        return SimpleNamespace(get_function=function)

    def launch(self, launches, what):
        for one in launches:
            told = KernelArguments.from_buffer_copy(one.arguments.contents)
            place = torch.device("cuda", one.device), self.functions[one.function or 0]
            grid = one.blocks, one.rows
            self.launches.append((*place, grid, told, bool(one.is_cooperative)))
            self.threads.append(one.threads)

    def create(self, name, indices, **options):
        kind = comm.registry.check_name(name)
        return kind([torch.device("cuda", index) for index in indices], **options)


class Spinning:
    """An event behind a kernel that spins, until its replica's error word is set."""

    def __init__(self, words):
        self.words = words

    def query(self):
        return any(self.words())


@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=str)
def test_closing_waits_for_kernels_but_for_seconds_while_an_exception_is_under_way(
    gpus, monkeypatch, error
):
    monkeypatch.setattr(collective_lock, "PATIENCE_SECONDS", 0.05)
    communicator = gpus.create("ring", (0, 1))
    machine = communicator._machine
    device = communicator.devices[0]
    collective_lock.lock_of(communicator)._last[device] = Stream, Spinning(machine.error_words)
    monkeypatch.setattr(collective_lock.CollectiveLock, "_record", lambda self, gpu: None)
    words = []
    monkeypatch.setattr(machine, "_synchronize", lambda: words.append(machine.error_words()))
    if error is None:
        communicator.close()
    else:
        with pytest.raises(error):
            try:
                raise error
            finally:
                communicator.close()
    assert words == [[0, 0] if error is None else [ABORTED] * 2]  # before it synchronises


@pytest.fixture
def gpus(monkeypatch):
    fake = FakeGpus(monkeypatch)
    yield fake
    for communicator in fake.kept:
        communicator.close()
    cuda_kernels._load.cache_clear()


def machine(gpus, name, indices):
    gpus.kept.append(gpus.create(name, indices))
    return gpus.kept[-1]._machine


def run(machine, kernel, dtype=torch.float32, **facts):
    machine.run(kernel, dtype, KernelArguments(num_replicas=2, island_size=2, **facts), 2)


def test_a_ring_opens_the_memory_of_neighbours_alone(gpus):
    machine(gpus, "ring", range(10))
    assert set(Counter(one for one, _ in gpus.peers).values()) == {2}
    assert all((one - other) % 10 in (1, 9) for one, other in gpus.peers)
    gpus.peers.clear()
    machine(gpus, "direct", range(4))
    assert sorted(gpus.peers) == list(permutations(range(4), 2))


@pytest.mark.parametrize("indices", [(0, 1), (0, 0), (0, 0, 1)], ids=str)
def test_only_gpus_with_several_replicas_are_launched_cooperatively(gpus, indices):
    run(machine(gpus, "direct", indices), "direct_two_shot")
    assert {device.index: cooperative for device, *_, cooperative in gpus.launches} == {
        index: number > 1 for index, number in Counter(indices).items()
    }
    for device, name, grid, arguments, _ in gpus.launches:
        rows = [i for i, index in enumerate(indices) if index == device.index]
        assert (name, grid) == ("direct_two_shot_kernel", (2, len(rows)))
        assert arguments.rows[: len(rows)] == rows


def test_every_gpu_loads_the_binary_of_its_kind_before_the_first_launch(gpus):
    both = machine(gpus, "ring", (0, 1))
    run(both, "ring_broadcast", torch.uint8)
    assert gpus.loaded == [str((Unit("ring"), capability)) for capability in (90, 91)]
    run(both, "ring_all_reduce", torch.uint8)
    assert gpus.loaded[2] == str((Unit("ring", "unsigned char"), 90))


@pytest.mark.parametrize(
    ("dtype", "n", "threads"),
    [(torch.float32, 8, 512), (torch.uint8, 2, 256), (torch.float32, 9, 256)],
    ids=str,
)
def test_a_block_has_the_threads_that_its_kernel_is_compiled_for(gpus, dtype, n, threads):
    call = KernelArguments(num_replicas=n, island_size=n)
    machine(gpus, "direct", range(n)).run("direct_two_shot", dtype, call, 2)
    assert gpus.threads == n * [threads]
    assert f"#define MIRROR_THREADS {threads}\n" in unit_source(
        unit_of("direct_two_shot", dtype, call)
    )


def test_only_what_is_used_is_loaded_and_once(gpus):
    both = machine(gpus, "direct", (0, 1))
    for op in (0, 2, 0):
        run(both, "direct_one_shot", op=op)
    run(both, "direct_reduce_scatter", op=0)
    assert gpus.loaded[::2] == [
        str((Unit("direct", "float", op=op, num_replicas=2), 90)) for op in (0, 2)
    ]


def test_what_a_trial_needs_is_compiled_at_once(gpus):
    four = gpus.create("hierarchical", range(4), islands=[(0, 2), (1, 3)])
    gpus.kept.append(four)
    four.prepare([("sum", torch.float32), ("max", torch.int64)])
    units, capabilities = gpus.compiled
    assert list(units) == [
        Unit("hierarchical"),
        Unit("hierarchical", "float", 0, num_replicas=4, island_size=2),
        Unit("hierarchical", "long long", 2, num_replicas=4, island_size=2),
    ]
    assert capabilities == {90, 91, 92, 93}


def test_local_memory_is_reserved_by_a_launch_of_its_own_on_an_idle_gpu(gpus, caplog):
    both = machine(gpus, "direct", (0, 1))
    gpus.local_bytes = {"direct_two_shot_kernel": 40}
    gpus.synchronized.clear()
    for _ in range(2):
        run(both, "direct_two_shot", torch.uint8, count=5)
    assert [device.index for device in gpus.synchronized] == [0, 1]
    launches = [(device.index, grid, told.count) for device, _, grid, told, _ in gpus.launches]
    collective = [(0, (2, 1), 5), (1, (2, 1), 5)]
    assert launches == [(0, (100, 1), 0), (1, (100, 1), 0), *collective, *collective]
    assert {name for _, name, *_ in gpus.launches} == {"direct_two_shot_kernel"}
    (message,) = caplog.messages
    assert "direct_two_shot on cuda:0 40, direct_two_shot on cuda:1 40 bytes per thread" in message
    assert "pip install" in message


@pytest.mark.parametrize(("indices", "most"), [((0, 1), 100), ((0, 0, 1), 50)], ids=str)
def test_all_blocks_of_a_gpu_fit_on_its_multiprocessors(gpus, indices, most):
    for max_blocks in (1, most):
        gpus.kept.append(gpus.create("ring", indices, max_blocks=max_blocks))
        assert gpus.kept[-1]._machine.max_blocks == max_blocks
    for max_blocks in (0, most + 1):
        with pytest.raises(ValueError, match=rf"1 to {most} .* got max_blocks={max_blocks}"):
            gpus.create("ring", indices, max_blocks=max_blocks)


KIB, MIB = 2**10, 2**20
BLOCKS = [
    # processors, GPU of each replica, blocks for messages of 256 KiB, 4, 16, 64 and 1024 MiB
    (132, (0, 0), (8, 16, 32, 66, 66)),
    (132, (0,) * 4, (8, 16, 32, 33, 33)),
    (132, (0,) * 8, (8, 16, 16, 16, 16)),
    (132, (0,), (8, 16, 32, 132, 132)),
    (132, (0, 1), (8, 16, 32, 64, 64)),
    (108, (0, 1), (8, 16, 32, 54, 54)),
    (132, (0, 0, 1, 1), (8, 16, 32, 33, 33)),
    (132, (0, 0, 1), (8, 16, 32, 33, 33)),
    (8, (0,) * 8, (1, 1, 1, 1, 1)),
    (2, (0, 0, 1), (1, 1, 1, 1, 1)),
]


def launched_blocks(gpus, communicator, sizes):
    """Returns the blocks of an all-reduce of each size, which no memory is allocated for."""
    n = len(communicator.devices)
    found = []
    for num_bytes in sizes:
        gpus.launches.clear()
        # One element that strides make as large as a message.
        one = torch.tensor([1.0]).expand(num_bytes // 4)
        communicator._launch("all_reduce", [one] * n, torch.float32)
        grids = {grid[0] for _, _, grid, *_ in gpus.launches}
        assert len(grids) == 1, "the launches of one collective differ"
        found.append(grids.pop())
    return tuple(found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("processors", "indices", "wanted"), BLOCKS, ids=str)
def test_large_messages_have_more_blocks_by_default(
    monkeypatch, name, processors, indices, wanted
):
    gpus = FakeGpus(monkeypatch, processors)
    machine(gpus, name, indices)
    sizes = (256 * KIB, 4 * MIB, 16 * MIB, 64 * MIB, 1024 * MIB)
    share = gpus.kept[-1].share("all_reduce", sizes[0]) // (8 * KIB)  # a pack for each thread
    wanted = (min(share, wanted[0]), *wanted[1:])
    assert launched_blocks(gpus, gpus.kept[-1], sizes) == wanted
    # One element more than a limit is a larger message.
    assert launched_blocks(gpus, gpus.kept[-1], [4 * MIB + 4]) == wanted[2:3]
    gpus.kept[-1].close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("indices", [row[1] for row in BLOCKS], ids=str)
@pytest.mark.parametrize("processors", [8, 20, 132])
def test_default_blocks_are_resident_together(monkeypatch, name, indices, processors):
    gpus = FakeGpus(monkeypatch, processors)
    made = machine(gpus, name, indices)
    (blocks,) = launched_blocks(gpus, gpus.kept[-1], [1024 * MIB])
    assert blocks == made.max_blocks  # what workspaces have room for
    rows = max(Counter(indices).values())
    # Collectives of two communicators may wait on each other's GPU: each fits beside the other.
    at_once = 1 if len(set(indices)) == 1 or rows * 2 > processors else 2
    assert at_once * rows * blocks <= processors
    assert all(grid == (blocks, Counter(indices)[d.index]) for d, _, grid, *_ in gpus.launches)
    gpus.kept[-1].close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_blocks", [1, 40])
def test_a_given_number_of_blocks_is_that_of_all_messages(gpus, name, max_blocks):
    gpus.kept.append(gpus.create(name, (0, 1), max_blocks=max_blocks))
    sizes = (4 * MIB, 64 * MIB)
    assert launched_blocks(gpus, gpus.kept[-1], sizes) == (max_blocks,) * 2


def test_a_small_message_has_one_shot_with_few_blocks(gpus):
    """The smallest row of the table leaves one-shot all-reduce its largest message."""
    machine(gpus, "direct", (0, 1))
    launched_blocks(gpus, gpus.kept[-1], [256 * KIB])
    assert {name for _, name, *_ in gpus.launches} == {"direct_one_shot_kernel"}


@pytest.mark.parametrize("name", NAMES)
def test_pairs_of_peers_are_those_of_both_directions(gpus, name):
    kind = comm.registry.check_name(name)
    for n in range(1, 17):
        pairs = kind.linked_pairs(n)
        assert {(j, i) for i, j in pairs} == set(pairs)
    devices = [torch.device("cuda", index) for index in (0, 1)]
    with pytest.raises(AssertionError, match=r"one way alone: .*index=0.*index=1"):
        cuda_kernels._enable_peer_access([(devices[0], devices[1])])


def test_default_device_and_inference_mode_are_not_its_own(gpus):
    with torch.device("meta"), torch.inference_mode():
        made = machine(gpus, "direct", (0, 1))
    memory = [made._errors, *made._workspaces]
    assert not any(tensor.is_inference() or tensor.is_meta for tensor in memory)
    made.reset()


def test_a_reset_leaves_nothing_of_what_was_aborted(gpus):
    made = machine(gpus, "direct", (0, 1))
    memory = [made._errors, *made._workspaces]
    for tensor in memory:
        tensor.fill_(7)
    gpus.synchronized.clear()
    made.reset()
    assert not any(tensor.any() for tensor in memory)
    # What still runs must not write afterwards; nor may what comes next begin before.
    assert [device.index for device in gpus.synchronized] == [0, 1, 0, 1]


def test_one_that_is_dropped_waits_for_its_kernels_before_it_gives_memory_back(gpus):
    dropped = gpus.create("ring", (0, 1))
    machine = dropped._machine
    gpus.synchronized.clear()
    del dropped
    gc.collect()
    assert [device.index for device in gpus.synchronized] == [0, 1]
    assert machine._workspaces == []


def test_one_that_is_closed_waits_once(gpus):
    closed = gpus.create("ring", (0, 1))
    gpus.synchronized.clear()
    closed.close()
    closed.close()
    del closed
    gc.collect()
    assert [device.index for device in gpus.synchronized] == [0, 1]


def test_sources_that_are_not_installed_are_a_reason(monkeypatch):
    monkeypatch.setattr(cuda_kernels, "source_folder", lambda: None)
    monkeypatch.setattr(cuda_kernels, "find_spec", lambda name: True)
    assert "csrc/" in cuda_kernels.kernels_missing_reason([])


def test_blocking_launches_are_a_reason(monkeypatch):
    monkeypatch.setattr(cuda_kernels.launcher, "launcher_missing_reason", lambda: "no driver")
    monkeypatch.setattr(cuda_kernels, "find_spec", lambda name: True)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "unset it" in cuda_kernels.kernels_missing_reason([])
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert cuda_kernels.kernels_missing_reason([]) == "no driver"


# ------------------------------------------------------------------ with a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(params=[(n, name) for n in (2, 4, 8) for name in NAMES], ids=str)
def on_one_gpu(request):
    n, name = request.param
    devices = [torch.device("cuda:0")] * n
    reason = comm.registry.unavailable_reason(name, devices)
    if reason is not None and "CuPy" in reason:
        pytest.skip(reason)
    communicator = comm.create(name, devices)
    yield communicator
    communicator.close()


@needs_gpu
def test_large_messages_on_one_gpu_have_the_bits_of_simulated_devices(on_one_gpu):
    n = len(on_one_gpu.devices)
    simulated = comm.create(on_one_gpu.name, ["cpu"] * n)
    if on_one_gpu.name == "hierarchical":
        simulated = comm.create("hierarchical", ["cpu"] * n, islands=on_one_gpu.islands)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = [torch.randn(5_000_003).to(dtype) for _ in range(n)]
        tensors = [value.cuda() for value in values]
        on_one_gpu.all_reduce(tensors)
        simulated.all_reduce(values)
        for tensor, value in zip(tensors, values, strict=True):
            assert torch.equal(tensor.cpu(), value)


@needs_gpu
@pytest.mark.slow
def test_many_calls_in_a_row_are_right_on_a_gpu(on_one_gpu):
    n = len(on_one_gpu.devices)
    tensors = [torch.full((1000,), i, dtype=torch.int32, device="cuda") for i in range(n)]
    for _ in range(10_000):
        on_one_gpu.all_reduce(tensors, "max")
        on_one_gpu.broadcast(tensors, n - 1)
    assert all(bool((tensor == n - 1).all()) for tensor in tensors)
