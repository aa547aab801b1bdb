"""How programs of replicas share threads: decided by what they have to do, and put back after."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mirror.compiler.runtime.parallel_launch import MUCH_WORK, ParallelLaunch
from tests.compiler.training import Beside


@pytest.fixture(autouse=True)
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)


class Program:
    def __init__(self, work, is_raw):
        self.work, self.is_raw = work, is_raw
        self.ran = []

    def run(self, values, device):
        self.ran.append((values, torch.get_num_threads(), threading.current_thread().name))
        if values == "raises":
            raise ValueError("as asked")


def ran(work, num_replicas, values="x", is_raw=True):
    devices = [torch.device("cpu")] * num_replicas
    replicas = SimpleNamespace(names=devices, devices=devices, are_simulated=True)
    program = Program(work, is_raw)
    ParallelLaunch(replicas).run(program, dict.fromkeys(range(num_replicas), values))
    return program.ran


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_small_programs_run_in_turn_in_one_thread(num_replicas):
    found = ran(MUCH_WORK - 1, num_replicas)
    assert [threads for _, threads, _ in found] == [1] * num_replicas
    assert {name for _, _, name in found} == {threading.current_thread().name}


def test_small_ones_of_torchs_kernels_run_in_turn_as_uncompiled_steps_do():
    found = ran(MUCH_WORK - 1, 2, is_raw=False)
    assert [threads for _, threads, _ in found] == [4, 4]


@pytest.mark.parametrize("is_raw", [True, False])
def test_long_ones_share_the_threads_at_once(is_raw):
    found = ran(MUCH_WORK, 2, is_raw=is_raw)
    assert [threads for _, threads, _ in found] == [2, 2]
    assert len({name for _, _, name in found}) == 2


def test_the_only_long_one_has_all_threads():
    assert [threads for _, threads, _ in ran(MUCH_WORK, 1)] == [4]


@pytest.mark.parametrize("work", [0, MUCH_WORK])
def test_threads_are_put_back_after_an_error(work):
    with pytest.raises(ValueError, match="as asked"):
        ran(work, 2, "raises")


@pytest.mark.parametrize(("width", "is_small"), [(8, True), (512, False)])
def test_work_is_told_from_the_graph(monkeypatch, width, is_small):
    seen = []
    run = ParallelLaunch.run

    def noting(self, program, own):
        seen.append(program.work)
        run(self, program, own)

    monkeypatch.setattr(ParallelLaunch, "run", noting)
    beside = Beside(2, lambda: nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3)))
    batch = torch.randn(64, width), torch.randint(0, 3, (64,))
    beside.train([batch, batch])
    beside.strategy.close()
    assert seen
    assert (max(seen) < MUCH_WORK) is is_small
