"""benchmarks/gpu_risks.py and gpu_blocks.py: checks of GPUs see what they are there to see."""

import importlib
from pathlib import Path

import pytest
import torch

from mirror import comm
from mirror.comm.kernels.kernel_communicator import KernelCommunicator
from tests.gpu.fake import FakeGpus

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPUS = (torch.device("cpu"),) * 2


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_the_sweep_finds_a_number_of_blocks_for_each_size_and_dtype(load, monkeypatch):
    blocks = load("gpu_blocks")
    best, rate = blocks.sweep("ring", CPUS, 2000, torch.bfloat16)
    assert best in blocks.SIMULATED_COUNTS
    assert rate > 0
    monkeypatch.setattr(blocks, "sweep", lambda name, devices, size, dtype: (size, dtype.itemsize))
    assert blocks.best_blocks("ring", CPUS, 4096 * 16) == "best: " + "; ".join(
        f"{size * width} B {dtype} {size} ({width:.1f} GB/s)"
        for size in (16, 256, 4096, 65536)
        for dtype, width in (("float32", 4), ("bfloat16", 2))
    )


def test_the_sweep_flags_blocks_that_change_bits(load, monkeypatch):
    blocks = load("gpu_blocks")
    reduce = KernelCommunicator.all_reduce

    def spoilt(self, tensors, op="sum", scale=1.0):
        reduce(self, tensors, op, scale)
        if self._machine.max_blocks == 4:
            tensors[-1][-1] += 1

    made = blocks.communicators("ring", CPUS)
    for communicator in made.values():
        monkeypatch.setattr(communicator, "all_reduce", spoilt.__get__(communicator))
    monkeypatch.setattr(blocks, "communicators", lambda name, devices: made)
    with pytest.raises(AssertionError, match="4 blocks give other bits than 1"):
        blocks.sweep("ring", CPUS, 1000, torch.float32)


def test_collectives_beside_allocations_and_products_are_right(load):
    risks = load("gpu_risks")
    assert "20 collectives beside" in risks.beside_allocations("direct", CPUS)
    assert "% of the shorter one hidden" in risks.beside_computation("direct", CPUS, 1000)


def test_a_wrong_sum_beside_allocations_is_flagged(load, monkeypatch):
    risks = load("gpu_risks")

    class Wrong(comm.Communicator):
        def all_reduce(self, tensors, op="sum", scale=1.0):
            tensors[0][0] = 3

        broadcast = reduce_scatter = all_gather = None

    monkeypatch.setattr(risks, "created", lambda name, devices, **options: Wrong(devices))
    with pytest.raises(AssertionError, match="replica 0 has a wrong sum"):
        risks.beside_allocations("direct", CPUS)


def test_peers_without_access_are_named_and_copies_are_looked_at(load, monkeypatch):
    risks, skipped = load("gpu_risks"), load("checking").Skipped
    with pytest.raises(skipped, match="one GPU only"):
        risks.peers_are_what_they_say((torch.device("cuda:0"),))
    with FakeGpus(2, peers=False) as gpus, pytest.raises(skipped, match="cuda:0 to cuda:1, cuda:"):
        risks.peers_are_what_they_say(tuple(gpus.devices))
    with FakeGpus(2) as gpus:
        assert "2 pairs at" in risks.peers_are_what_they_say(tuple(gpus.devices))
        copy = torch.Tensor.copy_

        def lying(self, other):
            return copy(self, other * 0)

        monkeypatch.setattr(torch.Tensor, "copy_", lying)
        with pytest.raises(AssertionError, match="cuda:0 to cuda:1: other bytes arrived"):
            risks.peers_are_what_they_say(tuple(gpus.devices))
        monkeypatch.undo()
