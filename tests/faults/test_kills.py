"""SIGKILL at any moment of a save, in a process of its own: what was saved is there, whole."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mirror
from tests.faults.saver import SIZE

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


def restored(directory):
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
        found = restored(directory)
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
def test_many_killed_saves_beside_the_training(tmp_path):
    # The time counts from the start of the process, which imports torch first.
    directory = tmp_path
    for i in range(6):
        save_and_kill(directory, "does not wait", 3.0 + 0.07 * i)
        restored(directory)
