"""The checks of GPUs in benchmarks/ run on simulated devices: they pass, or fail."""

import importlib
import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from mirror import comm
from mirror.comm.kernels.kernel_backends import KernelCommunicator
from mirror.device.streams import CopyStreams
from mirror.devices import synchronize
from tests.gpu.fake import FakeGpus

ROOT = Path(__file__).parents[2]
SKIPPED = {  # of the checks of a GPU, where there is none
    "nccl, one rank",
    "nccl, one rank, late streams",
    "nccl, one rank, time-out",
    "a device that fails, 2 on one",
    "a graph captured after a run",
    "peers",
}
# Others of their kind are shorter, they start processes, or test_gpu_several.py runs them.
LONG = re.compile("[18] on one|2 on one$|lockstep|process|first use|how many blocks")


@pytest.fixture
def run(script_pool):
    def run(*options):
        return script_pool.run_file(ROOT / "benchmarks" / "gpu_check.py", *options, timeout=900)

    return run


@pytest.fixture
def load_check(monkeypatch):
    """Imports a module of the benchmarks, which find each other as programs do."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.mark.slow
def test_the_short_checks_of_a_gpu_pass_on_simulated_devices(load_check):
    cpu = torch.device("cpu")
    made = [
        load_check("supervised").run_check(name, check)
        for name, check in load_check("gpu_check").checks(cpu, 1000)
        if not LONG.search(name)
    ]
    assert len(made) > 30
    assert [outcome for outcome in made if outcome.state == "failed"] == []
    assert {outcome.name for outcome in made if outcome.state == "skipped"} == {
        name for name in SKIPPED if not LONG.search(name)
    }


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_check_of_a_gpu_runs_on_simulated_devices(run, tmp_path):
    found = tmp_path / "found.json"
    options = f"--device cpu --elements 1000 --json {found}".split()
    result = run(*options)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(found.read_text())
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert {name for name, state in states.items() if state == "skipped"} == SKIPPED
    assert states["direct, 8 on one, late streams"] == "passed"
    assert set(states.values()) == {"passed", "skipped"}
    assert states["doctor"] == "passed"
    assert report["seconds"] < report["budget_seconds"] < 8 * 60
    assert f"s of {report['budget_seconds']} s" in result.stdout
    assert "auto and training, 4 on one device" in result.stdout
    assert "chose host" in result.stdout
    assert states["SyncBatchNorm beside buckets"] == "passed"


@pytest.mark.slow
def test_the_check_of_a_gpu_makes_those_that_are_named(run):
    result = run("--device", "cpu", "--only", "ring, 4 on one", "--elements", 99)
    assert result.returncode == 0, result.stdout + result.stderr
    names = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert names[:2] == ["passed", "passed"]
    assert "2 passed, 0 failed, 0 skipped; " in names[2]


@pytest.mark.parametrize("waits", [False, True])
def test_the_gpu_check_sees_whether_a_call_waits_for_earlier_work(load_check, monkeypatch, waits):
    gpu_check = load_check("gpu_check")

    def pageable(copies, tensor):
        synchronize(gpus.devices[0])
        return tensor

    with FakeGpus(2) as gpus, monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "_sleep", lambda cycles: None)
        if waits:
            patched.setattr(CopyStreams, "pin", pageable)
        with pytest.raises(AssertionError, match="waited") if waits else nullcontext():
            assert "busy" in gpu_check.waits_for_no_copy(tuple(gpus.devices))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_of_a_gpu_needs_one(run):
    result = run()
    assert result.returncode == 2
    assert "there is no GPU; --device cpu" in result.stderr


CPU = torch.device("cpu")


@pytest.fixture
def gpu_graphs(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("gpu_graphs")


@pytest.mark.slow
def test_every_check_passes_on_simulated_devices(gpu_graphs):
    checks = dict(gpu_graphs.graph_checks(CPU, (CPU,)))
    assert len(checks) == 5
    assert checks["compiled step, draws"]()


@pytest.mark.slow
def test_a_step_that_is_wrong_is_found(gpu_graphs, monkeypatch):
    train = gpu_graphs._Training.train

    def wrong(training, steps):
        train(training, steps + (training.mode is not None))

    monkeypatch.setattr(gpu_graphs._Training, "train", wrong)
    with pytest.raises(AssertionError, match="not close"):
        gpu_graphs.is_captured((CPU,) * 2)


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


def test_collectives_are_right_during_allocations_and_products(load):
    risks = load("gpu_risks")
    assert "20 collectives beside" in risks.beside_allocations("direct", CPUS)
    assert "% of the shorter one hidden" in risks.beside_computation("direct", CPUS, 1000)


def test_a_wrong_sum_during_allocations_is_flagged(load, monkeypatch):
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
