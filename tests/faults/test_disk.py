"""Saves that die, are killed, or meet a failing disk: no complete step is ever lost."""

import errno
import itertools
import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import mirror
from tests.faults.disk import Died, Disk
from tests.faults.saver import SIZE
from tests.pairs import every


def manager(directory, step, max_to_keep=5):
    objects = {"weight": torch.full((50,), float(step)), "step": step}
    checkpoint = mirror.Checkpoint(**objects)
    return mirror.CheckpointManager(checkpoint, directory, max_to_keep)


class Alone:
    """A checkpoint at a path, saved and restored like a manager's."""

    def __init__(self, path, step):
        self.checkpoint = mirror.Checkpoint(weight=torch.full((50,), float(step)), step=step)
        self.path = path

    def save(self, step):
        self.checkpoint.save(self.path)

    def restore_latest(self):
        return self.checkpoint.restore(self.path)["step"]


# What is there, what is saved, what makes either.
SAVES = {
    "a new step": ([1], 2, manager),
    "the first step": ([], 2, manager),
    "a step again": ([1, 2], 2, manager),
    "one that removes the oldest": ([0, 1], 2, lambda d, s: manager(d, s, 1)),
    "in place": ([1], 2, lambda d, s: Alone(d / "last", s)),
    "in place, the first": ([], 2, lambda d, s: Alone(d / "last", s)),
}


def prepared(directory, there, make):
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    with Disk():
        for step in there:
            make(directory, step).save(step)


def restored(directory, make):
    """Returns the step that is there, after a look at all of it; None where there is none."""
    one = make(directory, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            step = one.restore_latest()
        except mirror.CheckpointError as error:
            if isinstance(one, Alone) and "does not exist" in str(error):
                return None
            raise
    if step is not None:
        assert one.checkpoint.objects["step"] == step
        assert torch.equal(one.checkpoint.objects["weight"], torch.full((50,), float(step)))
    return step


def num_calls(directory, there, step, make):
    prepared(directory, there, make)
    with Disk() as disk:
        make(directory, step).save(step)
    return disk.calls


def try_fault(directory, save, at, error, share, seed=0):
    """Saves with a fault at one call; returns what the directory restores to, and if it ended."""
    there, step, make = SAVES[save]
    prepared(directory, there, make)
    has_returned = False
    with Disk(at, error) as disk:
        try:
            make(directory, step).save(step)
            has_returned = True
        except (Died, mirror.CheckpointError):
            pass
    disk.lose(share, seed)
    found = restored(directory, make)
    before = there[-1] if there else None
    assert found == step if has_returned else found in (before, step), (save, at, error, share)
    # The next save finds nothing in its way, and leaves nothing of the last one.
    with Disk():
        make(directory, 3).save(3)
    assert restored(directory, make) == 3
    left = [path.name for path in directory.rglob("*") if ".tmp-" in path.name]
    assert left == []
    return found


FAULTS = {
    "dies": (None, 0),
    "loses power": (None, 1),
    "is full": (errno.ENOSPC, 0),
    "fails": (errno.EIO, 0),
}
QUICK = [("in place", "dies"), ("a new step", "loses power"), ("a new step", "is full")]


OTHERS = [pair for pair in itertools.product(SAVES, FAULTS) if pair not in QUICK]


@pytest.mark.parametrize(("save", "fault"), QUICK)
def test_calls_of_a_save(tmp_path, save, fault):
    try_every_call(tmp_path, save, *FAULTS[fault])


@pytest.mark.slow
@pytest.mark.parametrize(("save", "fault"), OTHERS)
def test_every_call_of_every_save(tmp_path, save, fault):
    try_every_call(tmp_path, save, *FAULTS[fault])


def try_every_call(tmp_path, save, error, share):
    total = num_calls(tmp_path / "d", *SAVES[save])
    assert total >= 12
    found = [try_fault(tmp_path / "d", save, at, error, share) for at in range(total + 1)]
    assert found[-1] == SAVES[save][1]  # the last is without a fault
    assert len(set(found)) == 1 if SAVES[save][0][-1:] == [2] else len(set(found)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("seed", every(4, range(12)))
def test_any_share_of_what_was_not_synced_is_lost(tmp_path, save, seed):
    for at in range(num_calls(tmp_path / "d", *SAVES[save]) + 1):
        try_fault(tmp_path / "d", save, at, None, 0.5, seed)


SAVER = Path(__file__).with_name("saver.py")
ROOT = Path(__file__).parents[2]


def save_and_kill(directory, how, seconds):
    """Has a process save until it is killed; returns the last step that it called saved."""
    command = [sys.executable, str(SAVER), str(directory), how]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    saver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        first = saver.stdout.readline() if how == "waits" else ""
        saver.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        saver.kill()
        rest, _ = saver.communicate()
    assert saver.returncode == -9  # it was still saving
    said = [line for line in (first + rest).splitlines(keepends=True) if line.endswith("\n")]
    return int(said[-1]) if said else 0


def restored_step(directory):
    weight = torch.zeros(SIZE)
    checkpoint = mirror.Checkpoint(weight=weight, progress={"step": -1})
    step = mirror.CheckpointManager(checkpoint, directory).restore_latest()
    if step is not None:
        assert checkpoint.objects["progress"] == {"step": step}
        assert torch.equal(weight, torch.full((SIZE,), float(step)))
    return step or 0


def kill_and_look(directory, how, times):
    random.seed(times)
    last = 0
    for _ in range(times):
        said = save_and_kill(directory, how, random.uniform(0.01, 0.3))
        found = restored_step(directory)
        assert found >= max(said, last)
        last = found
    names = sorted(os.listdir(directory))
    assert sum(name.startswith("step-") for name in names) in (1, 2, 3)
    assert sum(".tmp-" in name for name in names) <= 2


def test_a_killed_save(tmp_path):
    kill_and_look(tmp_path, "waits", 1)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_many_killed_saves(tmp_path):
    kill_and_look(tmp_path, "waits", 12)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_many_killed_background_saves(tmp_path):
    # The time counts from the start of the process, which imports torch first.
    directory = tmp_path
    for i in range(6):
        save_and_kill(directory, "does not wait", 3.0 + 0.07 * i)
        restored_step(directory)
