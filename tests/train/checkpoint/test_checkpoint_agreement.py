"""Checkpoints over several workers: one writes, all restore and continue with the same bits."""

import os
import random
import shutil
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import mirror
from mirror.errors import CheckpointError
from tests.multi_worker import strategy_of
from tests.oracle import assert_same


class Training:
    """Running statistics, dropout, numbers of Python and numpy, each worker's own batches."""

    def __init__(self, counts, sharding="off"):
        torch.manual_seed(3)
        self.rank = int(os.environ.get("RANK", 0))
        random.seed(self.rank)
        np.random.seed(self.rank)
        self.strategy = strategy_of(counts)
        with self.strategy.scope():
            self.model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        x = torch.arange(120.0).view(40, 3) + self.rank * (sharding == "off")
        data = mirror.data.from_arrays((x,), 4, shuffle=True)
        options = mirror.InputOptions(sharding=sharding)
        self.batches = self.strategy.distribute_dataset(data, options)
        self.iterator = iter(self.batches)
        self.checkpoint = mirror.Checkpoint(
            model=self.model, optimizer=self.optimizer, batches=self.batches, seen=0
        )

    def steps(self, count):
        """Makes so many steps; returns all that they see."""
        found = []

        def step(batch):
            drawn = random.random(), float(np.random.rand())
            y = self.model(batch[0])
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
            return y.detach(), drawn

        for _ in range(count):
            batch = next(self.iterator)
            found.append(self.strategy.local_results(self.strategy.run(step, args=(batch,))))
            self.checkpoint.objects["seen"] += 1
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        own = [b.clone() for b in self.strategy.local_results(self.strategy.run(self.buffers))]
        return found, state, own, self.checkpoint.objects["seen"]

    def buffers(self):
        return self.model[0].running_mean + 0


def goes_on(counts, folder, wait, sharding="off"):
    training = Training(counts, sharding)
    training.steps(3)
    manager = mirror.CheckpointManager(training.checkpoint, Path(folder) / "run")
    manager.save(3, wait=wait)
    expected = training.steps(4)
    training.steps(1)
    assert manager.restore_latest() == 3
    training.iterator = iter(training.batches)
    assert_same(training.steps(4), expected)
    manager.close()
    training.strategy.close()
    return expected[-1]


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_restored_goes_on_to_the_same_bits(worker_pool, tmp_path, wait):
    assert worker_pool(2).run(goes_on, (1, 2), str(tmp_path), wait) == [7, 7]


def restores(counts, folder):
    training = Training(counts, "data")
    step = mirror.CheckpointManager(training.checkpoint, Path(folder) / "run").restore_latest()
    mean = training.model[0].running_mean.clone()
    training.strategy.close()
    return step, mean


def test_another_number_of_workers_restores_it(worker_pool, tmp_path):
    worker_pool(2).run(goes_on, (1, 1), str(tmp_path), True, "data")
    (step, mean), (_, same) = worker_pool(2).run(restores, (1, 1), str(tmp_path))
    assert step == 3
    assert_same(same, mean)
    assert_same(restores((2,), str(tmp_path)), (3, mean))


def apart(folder):
    """Saves to another directory on each worker; returns which workers wrote, and the messages."""
    training = Training((1, 1))
    own = Path(folder) / str(training.rank)
    training.checkpoint.save(own)
    has_written = own.exists()
    with pytest.raises(CheckpointError) as caught:
        training.checkpoint.restore(own)
    training.strategy.close()
    return has_written, str(caught.value)


def test_the_chief_alone_writes_and_a_directory_of_ones_own_is_found_out(worker_pool, tmp_path):
    (first, said), (second, also) = worker_pool(2).run(apart, str(tmp_path))
    assert (first, second) == (True, False)
    assert "worker 1 of 2" in said
    assert "share" in said
    assert "does not exist" in also


def stale(folder):
    training = Training((1, 1))
    own = Path(folder) / str(training.rank)
    training.checkpoint.save(own)
    if training.rank == 0:
        shutil.copytree(own, Path(folder) / "1")
    training.checkpoint.save(own)
    with pytest.raises(CheckpointError, match="worker 1 of 2 has read another one") as caught:
        training.checkpoint.restore(own)
    training.strategy.close()
    return str(caught.value)


def test_a_worker_that_reads_another_checkpoint_is_named_on_all_workers(worker_pool, tmp_path):
    first, second = worker_pool(2).run(stale, str(tmp_path))
    assert first[:-1].rpartition("/")[0] == second[:-1].rpartition("/")[0]


def fails(folder):
    training = Training((1, 1))
    with pytest.raises(CheckpointError) as caught:
        training.checkpoint.save(Path(folder) / "taken")
    training.strategy.close()
    return str(caught.value)


def test_a_save_that_fails_fails_on_all(worker_pool, tmp_path):
    (tmp_path / "taken").write_text("")
    for said in worker_pool(2).run(fails, str(tmp_path)):
        assert "will not be replaced" in said


def older(folder):
    training = Training((1, 1))
    manager = mirror.CheckpointManager(training.checkpoint, folder)
    for step in (1, 2):
        manager.save(step)
    if training.rank == 0:
        os.truncate(next(manager.latest.path.glob("*.safetensors")), 100)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = manager.restore_latest()
    training.strategy.close()
    return found, len(told)


def test_all_skip_the_checkpoint_that_the_chief_finds_damaged(worker_pool, tmp_path):
    assert worker_pool(2).run(older, str(tmp_path)) == [(1, 1), (1, 0)]


def preempted(folder, at):
    training = Training((1, 1))
    manager = mirror.CheckpointManager(training.checkpoint, folder)
    count = 0
    with pytest.raises(SystemExit) as left, mirror.PreemptionCheckpointHandler(manager):
        for _ in range(5):
            if count == at and training.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            training.steps(1)
            count += 1
    training.strategy.close()
    return left.value.code, count, int(manager.latest), training.checkpoint.objects["seen"]


@pytest.mark.parametrize("at", [0, 2])
def test_one_worker_that_is_asked_to_leave_takes_all_along(worker_pool, tmp_path, at):
    first, second = worker_pool(2).run(preempted, str(tmp_path), at)
    assert first == second
    assert first[0] == 42
    assert first[2] == max(at, 1)
