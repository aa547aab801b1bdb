"""Kernels on simulated devices: what ring, hierarchical and direct share, on the CPU."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
import torch

from mirror import comm
from mirror.comm import registry
from mirror.comm.kernels import simulator
from mirror.comm.kernels.launcher import KernelArguments
from mirror.errors import BackendError, CollectiveTimeoutError
from tests.pairs import each_once

NAMES = ("direct", "hierarchical", "ring")


@pytest.fixture(params=NAMES)
def four(request):
    communicator = comm.create(request.param, ["cpu"] * 4, timeout_seconds=0.05)
    yield communicator
    communicator.close()


def full(n, size, dtype=torch.float32):
    """Returns tensors of which number i is full of i + 1."""
    return [torch.full((size,), i + 1, dtype=dtype) for i in range(n)]


def test_arguments_are_the_struct_of_the_kernels():
    assert simulator.simulator_library().mirror_arguments_bytes() == ctypes.sizeof(KernelArguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_number_widens_as_in_torch(dtype):
    is_bfloat16 = int(dtype is torch.bfloat16)
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    expected = bits.view(dtype).float()
    widened = [simulator.simulator_library().mirror_widen(is_bfloat16, i) for i in range(2**16)]
    assert torch.equal(torch.tensor(widened).nan_to_num(), expected.nan_to_num())
    assert torch.equal(torch.tensor(widened).isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrowing_rounds_as_in_torch(dtype):
    is_bfloat16 = int(dtype is torch.bfloat16)
    # All that is representable, the middles in between, and the neighbours of both.
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    halves = halves[halves.isfinite()].sort().values
    middles = (halves[1:].double() + halves[:-1].double()).div(2).float()
    inf = torch.tensor(torch.inf)
    values = torch.cat([halves, middles, middles.nextafter(inf), middles.nextafter(-inf)])
    values = torch.cat([values, torch.tensor([torch.inf, -torch.inf, 65519.0, 65520.0, 3e38])])
    narrowed = [
        simulator.simulator_library().mirror_narrow(is_bfloat16, x) for x in values.tolist()
    ]
    got = torch.tensor(narrowed, dtype=torch.int32).to(torch.int16)
    assert torch.equal(got, values.to(dtype).view(torch.int16))


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_stays_one_in_half_types(name):
    communicator = comm.create(name, ["cpu"] * 2)
    for dtype in (torch.float16, torch.bfloat16):
        tensors = [torch.tensor([torch.nan, 1.0], dtype=dtype), torch.ones(2, dtype=dtype)]
        communicator.all_reduce(tensors)
        for tensor in tensors:
            assert tensor.isnan().tolist() == [True, False]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [9, 13, 16])
def test_up_to_sixteen_replicas_are_served(name, n):
    communicator = comm.create(name, ["cpu"] * n)
    tensors = full(n, 1000)
    communicator.all_reduce(tensors)
    assert all(bool((tensor == n * (n + 1) / 2).all()) for tensor in tensors)


@pytest.mark.parametrize("name", NAMES)
def test_peer_access_is_mutual(name):
    # For memory in segments that grow, torch enables the access of the other direction only.
    kind = registry.check_name(name)
    for n in range(1, 17):
        pairs = set(kind.linked_pairs(n))
        assert pairs == {(j, i) for i, j in pairs}


@pytest.mark.parametrize("name", NAMES)
def test_seventeen_replicas_are_too_many(name):
    with pytest.raises(BackendError, match="at most 16 replicas"):
        comm.create(name, ["cpu"] * 17)


@each_once(name=NAMES, dtype=[torch.float32, torch.bfloat16, torch.uint8])
def test_messages_of_many_segments_and_unaligned_tensors_are_right(name, dtype):
    # 1 MB and more, of which replica i begins i elements after where memory is aligned
    n, size = 3, 300_001
    memory = [torch.full((size + 3,), 9, dtype=dtype) for _ in range(n)]
    tensors = [m[i : i + size] for i, m in enumerate(memory)]
    for i, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(size) % 50 + i)
    expected = (torch.arange(size) % 50 * n + 3).to(dtype)
    communicator = comm.create(name, ["cpu"] * n)
    communicator.all_reduce(tensors)
    for i, m in enumerate(memory):
        assert torch.equal(m[i : i + size], expected)
        assert bool((m[:i] == 9).all())
        assert bool((m[i + size :] == 9).all())


@pytest.mark.parametrize("name", ["direct"])
def test_direct_has_the_bits_of_naive(name):
    direct, naive = comm.create(name, ["cpu"] * 5), comm.create("naive", ["cpu"] * 5)
    for size in (1000, 100_003):  # one-shot, two-shot
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            tensors = [torch.randn(size).to(dtype) for _ in range(5)]
            others = [tensor.clone() for tensor in tensors]
            direct.all_reduce(tensors, scale=0.3)
            naive.all_reduce(others, scale=0.3)
            assert all(map(torch.equal, tensors, others))


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_a_replica_that_does_not_come_is_named(four, collective):
    four._machine.absent = 0b0100
    with pytest.raises(
        CollectiveTimeoutError,
        match=rf"within 0.05 s; {four.name} {collective} of 4000 bytes .* waited for replica 2",
    ):
        getattr(four, collective)(full(4, 1000))


def test_a_communicator_works_again_after_a_timeout(four):
    four._machine.absent = 0b0010
    with pytest.raises(TimeoutError):
        four.all_reduce(full(4, 1000))
    four._machine.absent = 0
    four._timeout_ns = int(60e9)
    for _ in range(3):
        tensors = full(4, 1000)
        four.all_reduce(tensors)
        assert all(tensor.tolist() == [10] * 1000 for tensor in tensors)


def test_an_abort_ends_waits_at_once_and_raises_in_the_collective(four):
    four._timeout_ns = int(600e9)
    four._machine.absent = 0b1000
    begun, run = threading.Event(), four._machine.run

    def running(*call):
        begun.set()
        run(*call)

    four._machine.run = running
    with ThreadPoolExecutor(1) as pool:
        reduced = pool.submit(four.all_reduce, full(4, 1000))
        assert begun.wait(timeout=20)
        while not reduced.done():  # the kernel may not have begun
            four.abort()
            sleep(0.01)
        with pytest.raises(BackendError, match="aborted, and what was reduced last may be garba"):
            reduced.result(timeout=20)
    four._machine.reset()  # the last abort may have come after the collective, for the next one
    four._machine.absent = 0
    tensors = full(4, 1000)
    four.all_reduce(tensors)
    assert tensors[0].tolist() == [10] * 1000


def test_a_negative_timeout_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        comm.create("ring", ["cpu"], timeout_seconds=-1)


def test_a_library_that_is_not_built_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(simulator, "PATH", tmp_path / "_simulate.so")
    simulator.simulator_missing_reason.cache_clear()
    try:
        for name in NAMES:
            with pytest.raises(BackendError, match="not built; install mirror"):
                comm.create(name, ["cpu"])
        assert comm.available(["cpu"]) == ("host", "naive")
    finally:
        monkeypatch.undo()
        simulator.simulator_missing_reason.cache_clear()
