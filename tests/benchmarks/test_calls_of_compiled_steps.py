"""What a step that replays CUDA graphs costs the host: calls per replica, none per parameter.

On simulated GPUs, with graphs whose launch does nothing. ``calls`` are those of functions written
in Python in the package, and ``c_calls`` those that the package makes of functions written in C.
"""

import functools
import gc
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mirror
from mirror.comm.communicator import Communicator
from tests.gpu.compiling import Training, compiling_gpus, plain_step
from tests.gpu.graphs import FakeGraph, graphs_on
from tests.profiled import profiled

PACKAGE = str(Path(mirror.__file__).parent)


def model(num_layers):
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
    return nn.Sequential(*layers, nn.Linear(8, 4))


class Operations(TorchDispatchMode):
    """Counts the operations that reach torch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def replaying(names, num_layers, measure):
    """Returns what ``measure`` returns for a call of a step that replays its graphs."""
    with compiling_gpus(len(names)) as gpus, graphs_on(gpus):
        training = Training(names, functools.partial(model, num_layers), make_step=plain_step)
        parts = training.parts(4 * len(names), 0)
        for _ in range(4):
            training.compiled(*parts)
        with mock.patch.object(FakeGraph, "replay"):
            found = measure(lambda: training.compiled(*parts), training)
        training.close()
        gpus.order.violations.clear()  # what no launch has written
    return found


def count_calls(call, training):
    counts = Counter()

    def count(frame, event, arg):
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(PACKAGE):
            counts[event] += 1

    gc.collect()
    gc.disable()
    try:
        with profiled(count):
            call()
            counts.clear()
            call()
    finally:
        gc.enable()
    return counts["call"], counts["c_call"]


def count_operations(call, training):
    with mock.patch.object(Communicator, "all_reduce_checked"):
        with Operations() as operations:
            call()
        left = operations.counts.copy()
        with Operations() as operations:
            [parameter.grad for parameter in training.model.parameters()]
    return left, operations.counts


@functools.cache
def calls(num, num_layers, *, is_shared=False):
    names = ["cuda:0"] * num if is_shared else [f"cuda:{r}" for r in range(num)]
    return replaying(names, num_layers, count_calls)


def test_one_replica_takes_a_fixed_number_of_calls():
    made, c_made = calls(1, 2)
    assert made <= 144
    assert c_made <= 151


@pytest.mark.parametrize(("is_shared", "most", "most_c"), [(False, 27, 49), (True, 1, 14)])
def test_an_added_replica_takes_a_few_calls(is_shared, most, most_c):
    few, many = (calls(num, 2, is_shared=is_shared) for num in (2, 4))
    assert (many[0] - few[0]) / 2 <= most
    assert (many[1] - few[1]) / 2 <= most_c


@pytest.mark.parametrize("num", [1, 2])
def test_a_parameter_more_takes_no_call(num):
    assert calls(num, 5) == calls(num, 2)


@pytest.mark.parametrize("num", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_dispatches_copies_of_batch_and_results_alone(num):
    names = [f"cuda:{r}" for r in range(num)]
    left, read = replaying(names, 2, count_operations)
    compared = left.pop("equal.default")  # a constant of the host, there
    assert compared == 1
    # The batch, and with one replica the gradients, whose reads are not seen; then the results.
    num_copies = num if num > 1 else 2
    assert left == {"_foreach_copy_.default": num_copies, "_foreach_mul.Scalar": num}
    if num == 1:
        assert not read
    else:
        assert read["_foreach_mul.Scalar"] == 1  # of all gradients, when the first one is read
