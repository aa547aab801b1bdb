"""The conformance suite of backends, and trainings, on simulated GPUs, in stream order."""

import inspect
from itertools import product
from unittest import mock

import pytest
import torch

from mirror import comm
from mirror.comm.collective_lock import CollectiveLock
from mirror.comm.communicator import DTYPES
from tests.comm import test_conformance
from tests.gpu.fake_cupy import gpus_with_cupy
from tests.gpu.order import StreamError
from tests.gpu.programs import names, train
from tests.gpu.test_planted import collectives_in_backward
from tests.pairs import each_once

KERNELS = ("direct", "ring", "hierarchical")
PLACES = {f"{n}-gpus": names(n) for n in (1, 2, 4, 8)} | {"one-gpu-x3": ["cuda:0"] * 3}


def run_suite(communicator, dtypes, packs):
    """Asks of a communicator what the conformance suite does; returns of how many tests.

    Args:
        dtypes: those of the tests of one type; lists have all of them.
        packs: the sizes of packs in which lists are reduced.
    """
    num_tests = 0
    with mock.patch.object(test_conformance, "PACKS", packs):
        for name, test in vars(test_conformance).items():
            if name.startswith("test_") and "communicator" in inspect.signature(test).parameters:
                marks = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.args]
                for values in product(*(values for _, values in marks)):
                    parameters = dict(zip([name for name, _ in marks], values, strict=True))
                    if parameters.get("dtype") in (None, *dtypes):
                        test(communicator, **parameters)
                        num_tests += 1
    return num_tests


# Of 8 devices all, and of two all dtypes, for "direct" alone; the others' take long.
LONG = [
    pytest.param(backend, place, marks=pytest.mark.slow)
    for backend in ("ring", "hierarchical")
    for place in ("2-gpus", "8-gpus")
]
SHORT = [
    (backend, place)
    for backend in ("naive", *KERNELS)
    for place in PLACES
    if backend in ("naive", "direct") or place not in ("2-gpus", "8-gpus")
]


@pytest.mark.parametrize(("backend", "place"), [*SHORT, *LONG])
def test_a_backend_passes_the_suite_in_order(backend, place):
    with gpus_with_cupy(8) as gpus:
        communicator = comm.create(backend, PLACES[place])
        # What differs by dtype does so for any number of devices.
        is_whole = place == "2-gpus"
        wanted = (DTYPES, test_conformance.PACKS) if is_whole else ((torch.bfloat16,), (1000,))
        num_tests = run_suite(communicator, *wanted)
        communicator.close()
        assert num_tests >= (36 if is_whole else 9)
        assert bool(gpus.cupy.launches) == (backend in KERNELS)


def test_local_memory_is_reserved_while_no_gpu_is_busy(caplog):
    with gpus_with_cupy(2) as gpus:
        communicator = comm.create("direct", names(2))
        gpus.cupy.local_bytes = {"direct_one_shot": 16, "direct_two_shot": 40}
        for _ in range(2):  # the self-test has loaded no kernel for bytes
            tensors = [torch.full((3,), i, dtype=torch.uint8, device=f"cuda:{i}") for i in (0, 1)]
            communicator.all_reduce(tensors)  # enqueued behind what fills them
            assert [tensor.tolist() for tensor in tensors] == [[1, 1, 1], [1, 1, 1]]
        assert gpus.cupy.pools == {0: 40, 1: 40}
        (message,) = caplog.messages
        assert "direct_one_shot on cuda:0 16, direct_two_shot on cuda:0 40" in message
        communicator.close()


@each_once(backend=KERNELS, n=[2, 4])
def test_training_on_kernels_is_in_order(backend, n):
    expected = train(["cpu"] * n, "dataset")
    with gpus_with_cupy(n) as gpus:
        assert train(names(n), "dataset", backend=backend) == pytest.approx(expected, rel=1e-4)
        assert {name.partition("_")[0] for name in gpus.cupy.launches} == {backend}


@pytest.mark.parametrize("backend", KERNELS)
def test_collectives_of_a_backward_pass_take_turns_with_buckets(backend):
    with gpus_with_cupy(2):
        collectives_in_backward(backend)


@pytest.mark.parametrize("backend", KERNELS)
def test_without_turns_workspaces_are_used_twice_at_once(backend, monkeypatch):
    monkeypatch.setattr(CollectiveLock, "_wait_for_previous", lambda self, gpu: None)
    with pytest.raises(StreamError, match="unordered with"), gpus_with_cupy(2):
        collectives_in_backward(backend)
