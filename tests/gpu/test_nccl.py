"""The backend "nccl" on simulated GPUs: conformance suite, trainings, planted bugs."""

import pytest
import torch

import mirror
from mirror import comm
from mirror.comm.communicator import DTYPES
from mirror.comm.nccl.clique import Clique
from mirror.comm.nccl.nccl_backend import NcclCommunicator
from mirror.device.streams import SideStream
from tests.comm import test_conformance
from tests.comm.nccl.fake_nccl import MISSING
from tests.gpu.fake_nccl import gpus_with_nccl
from tests.gpu.order import StreamError
from tests.gpu.programs import WAYS, names, train
from tests.gpu.test_backends import run_suite
from tests.gpu.test_planted import CURRENT, collectives_in_backward, fault
from tests.pairs import EXHAUSTIVE

pytestmark = pytest.mark.skipif(bool(MISSING), reason=str(MISSING))


@pytest.mark.parametrize(
    ("n", "dtypes", "packs"),
    [
        *((n, (torch.bfloat16,), (1000,) if n == 2 else ()) for n in (1, 2, 4, 8)),
        pytest.param(2, DTYPES, test_conformance.PACKS, marks=pytest.mark.slow),
        pytest.param(3, DTYPES, (1000,), marks=pytest.mark.slow),
        pytest.param(8, (torch.float32, torch.bfloat16), (1000,), marks=pytest.mark.slow),
    ],
)
def test_it_passes_the_suite_in_order(n, dtypes, packs):
    with gpus_with_nccl(n) as gpus:
        communicator = comm.create("nccl", names(n))
        num_tests = run_suite(communicator, dtypes, packs)
        communicator.close()
        assert num_tests >= {1: 9, 2: 14, len(DTYPES): 36}[len(dtypes)]
        assert len(gpus.nccl.enqueued) >= num_tests * n


@pytest.fixture(scope="module")
def expected():
    return {n: train(["cpu"] * n, "dataset") for n in (1, 2, 4, 8)}


LONG = [(n, way) for n in (1, 4, 8) for way in WAYS if (n, way) != (4, "dataset")]


@pytest.mark.parametrize(
    ("n", "way"),
    [
        *((2, way) for way in WAYS),
        (4, "dataset"),
        *(
            pytest.param(*case, marks=EXHAUSTIVE * (case[0] < 8) or pytest.mark.slow)
            for case in LONG
        ),
    ],
)
def test_training_is_in_order(n, way, expected):
    with gpus_with_nccl(n) as gpus:
        losses = train(names(n), way, backend="nccl")
        assert set(gpus.nccl.enqueued) >= {"ncclAllReduce"} or n == 1
    assert losses == pytest.approx(expected[n], rel=1e-4)


def test_auto_takes_it_for_distinct_gpus():
    with gpus_with_nccl(2), mirror.MirroredStrategy(names(2)) as strategy:
        assert strategy.backend == "nccl"


def buckets_beside_collectives():
    collectives_in_backward("nccl")


def reduce_on_own_streams(communicator, dtype):
    """Sums what was made on a stream of each GPU, there, and uses it there."""
    own = [torch.cuda.Stream(device) for device in communicator.devices]
    tensors = []
    for stream, device in zip(own, communicator.devices, strict=True):
        with torch.cuda.stream(stream):
            tensors.append(torch.ones(10, dtype=dtype, device=device))
    for stream in own:
        torch.cuda.set_stream(stream)
    for _ in range(2):
        communicator.all_reduce(tensors)
        for tensor in tensors:
            tensor.add_(1)
    for device in communicator.devices:
        torch.cuda.set_stream(torch.cuda.default_stream(device))


def on_own_streams(dtype):
    def program():
        communicator = comm.create("nccl", names(2))
        reduce_on_own_streams(communicator, dtype)
        communicator.close()

    return program


def training(way):
    return lambda: train(names(2), way, backend="nccl")


STREAM = "streams[replica_id]"
OWN = "[stream_address(device) for device in self._devices]"
BUGS = {
    "collectives are on the default streams": (
        fault(Clique, "run", OWN, "[0] * len(self._devices)"),
        training("plain"),
    ),
    "collectives are on the streams of the first one": (
        fault(Clique, "run", OWN, f"self.__dict__.setdefault('_streams', {OWN})"),
        buckets_beside_collectives,
    ),
    "one replica's call is on its default stream": (
        fault(Clique, "run", STREAM, f"{STREAM} if replica_id else 0"),
        on_own_streams(torch.float32),
    ),
    "no wait until NCCL has enqueued": (
        fault(Clique, "run", "self._settle(result)", "pass"),
        on_own_streams(torch.float32),
    ),
    "half types are taken before they have arrived": (
        fault(NcclCommunicator, "_reduce_halves", "self._run(collective, tensors, exch",
           "with torch.cuda.stream(torch.cuda.Stream(tensors[0].device)):\n"
           "                    self._run(collective, tensors, exch"),
        on_own_streams(torch.bfloat16),
    ),
    "the side does not wait for the computation": (
        fault(SideStream, "start", f"stream.wait_stream({CURRENT})", "pass"),
        training("plain"),
    ),
    "the computation does not wait for the side": (
        fault(SideStream, "start", f"{CURRENT}.wait_event(event)", "pass"),
        training("plain"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_flagged(name, monkeypatch):
    bug, program = BUGS[name]
    bug(monkeypatch)
    flagged = pytest.raises(StreamError, match=r"unordered with|freed and given out again")
    with flagged, gpus_with_nccl(2):
        program()


@pytest.mark.parametrize("polls", [0, 2])
@pytest.mark.parametrize(
    "program",
    [
        buckets_beside_collectives,
        on_own_streams(torch.float32),
        on_own_streams(torch.bfloat16),
        on_own_streams(torch.int64),
    ],
)
def test_without_the_bug_the_same_program_is_in_order(program, polls):
    with gpus_with_nccl(2, polls):
        program()
