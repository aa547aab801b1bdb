"""Rotation and saves remove only what checkpoints write, whatever else lies there."""

import contextlib
import itertools
import logging
import os
import random
import signal
from pathlib import Path

import pytest
import torch

import mirror
from mirror.train.checkpoint import checkpoint_directory
from mirror.train.checkpoint.checkpoint_directory import FILE_NAME, remove_checkpoint

TEMPORARY = f".{FILE_NAME}.tmp-0123"


def save(directory, *steps, **options):
    for step in steps:
        mirror.CheckpointManager(mirror.Checkpoint(x=step), directory, **options).save(step)


def save_and_exit(directory, step):
    """Saves as a preemption does: the handler of a program that got the signal."""
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
    manager = mirror.CheckpointManager(mirror.Checkpoint(x=step), directory, max_to_keep=1)
    manager.progress.count_from(step - 1)
    with pytest.raises(SystemExit), mirror.PreemptionCheckpointHandler(manager):
        os.kill(os.getpid(), signal.SIGTERM)
        strategy.run(optimizer.step)
    strategy.close()


def save_in_place(directory, step):
    mirror.Checkpoint(x=step).save(directory / "last")


SAVES = {
    "manager": lambda directory, step: save(directory, step, max_to_keep=1),
    "preemption": save_and_exit,
    "in place": save_in_place,
}

# Everything that a directory of checkpoints may have beside them; each function makes one entry.
ENTRIES = {
    "a link to another run's checkpoint": lambda at, out: at.symlink_to(
        out / "run" / "step-000000007"
    ),
    "a link to a directory with a file of that name": lambda at, out: at.symlink_to(out / "named"),
    "a link to a directory": lambda at, out: at.symlink_to(out / "data"),
    "a link to a file": lambda at, out: at.symlink_to(out / "data" / "thesis"),
    "a link to nothing": lambda at, out: at.symlink_to(out / "nothing"),
    "a link to itself": lambda at, out: at.symlink_to(at),
    "a checkpoint with a foreign file": lambda at, out: fill(at, FILE_NAME, "thesis"),
    "a checkpoint with a directory": lambda at, out: fill(at, FILE_NAME, "more/thesis"),
    "a checkpoint with hostile names": lambda at, out: fill(
        at, FILE_NAME, f".{FILE_NAME}.tmp-mine", f"{FILE_NAME}.tmp-01", f"x{FILE_NAME}"
    ),
    "a checkpoint that is a link to a file": lambda at, out: (
        at.mkdir(),
        (at / FILE_NAME).symlink_to(out / "data" / "thesis"),
    ),
    "a directory as checkpoint": lambda at, out: fill(at, f"{FILE_NAME}/thesis"),
    "a directory as temporary file": lambda at, out: fill(at, f"{TEMPORARY}/thesis"),
    "a directory": lambda at, out: fill(at, "thesis"),
    "a file": lambda at, out: at.write_text("mine"),
}

# step-3 is removed by the rotation, step-9 is the one saved; the others are like temporary names.
NAMES = (
    "step-3",
    "step-000000009",
    ".step-3.tmp-0123",
    ".last.tmp-0123",
    ".step-3.tmp-backup",
    ".step-by-step.tmp-01",
    "last.tmp-01",
    "step-by-step",
)


def fill(directory, *names):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("mine")


def outside(path):
    """Makes what links point to."""
    save(path / "run", 7)
    fill(path / "named", FILE_NAME, TEMPORARY, "thesis")
    fill(path / "data", "thesis", TEMPORARY)
    return path


def files_of(path):
    """Returns the content of every file, links not followed, by path."""
    folders = [Path(folder) for folder, *_ in os.walk(path)]
    files = [file for folder in folders for file in folder.iterdir() if not file.is_symlink()]
    return {file.relative_to(path): file.read_bytes() for file in files if file.is_file()}


def foreign_of(files):
    """Returns those files that no checkpoint writes."""
    ours = (FILE_NAME, TEMPORARY)
    return {
        path: content
        for path, content in files.items()
        if path.name not in ours or not path.parent.name.startswith(("step-", ".step-", ".last."))
    }


@pytest.mark.parametrize("how", SAVES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_not_of_a_checkpoint_stays(tmp_path, entry, how):
    out = outside(tmp_path / "out")
    for name in NAMES:
        directory = tmp_path / name.strip(".")
        save(directory, 1)
        ENTRIES[entry](directory / name, out)
        before, others = foreign_of(files_of(directory)), files_of(out)
        try:
            SAVES[how](directory, 9)
            SAVES[how](directory, 10)
        except mirror.CheckpointError:  # the name is taken by what is not a checkpoint
            assert name == "step-000000009"
        assert files_of(out) == others, name
        assert before.items() <= files_of(directory).items(), name


def test_random_directories_lose_nothing_that_is_foreign(tmp_path):
    draw = random.Random(5)
    out = outside(tmp_path / "out")
    others = files_of(out)
    for i in range(40):
        directory = tmp_path / f"run-{i}"
        directory.mkdir()
        for step in draw.sample(range(20), 6):
            draw.choice([*ENTRIES.values()])(directory / f"step-{step}", out)
        before = foreign_of(files_of(directory))
        for step in draw.sample(range(20), 4):
            try:
                save(directory, step, max_to_keep=draw.choice((1, 2, 5)))
            except mirror.CheckpointError:
                continue
        assert files_of(out) == others
        assert before.items() <= files_of(directory).items()


def test_the_rotation_removes_links_and_not_what_they_point_to(tmp_path):
    save(tmp_path / "other", 7)
    os.makedirs(tmp_path / "run")
    (tmp_path / "run" / "step-000000001").symlink_to("../other/step-000000007")
    manager = mirror.CheckpointManager(mirror.Checkpoint(x=0), tmp_path / "run", max_to_keep=1)
    assert manager.restore_latest() == 1
    assert manager.checkpoint.objects == {"x": 7}  # restored through the link
    save(tmp_path / "run", 2, max_to_keep=1)
    assert os.listdir(tmp_path / "run") == ["step-000000002"]
    assert os.listdir(tmp_path / "other" / "step-000000007") == [FILE_NAME]


def test_a_step_whose_name_is_a_link_is_saved_beside_what_the_link_points_to(tmp_path):
    save(tmp_path / "other", 7)
    os.makedirs(tmp_path / "run")
    (tmp_path / "run" / "step-000000001").symlink_to("../other/step-000000007")
    save(tmp_path / "run", 1)
    assert not (tmp_path / "run" / "step-000000001").is_symlink()
    assert mirror.Checkpoint(x=0).restore(tmp_path / "other" / "step-000000007") == {"x": 7}


def test_a_directory_with_a_foreign_file_stays_and_is_reported_once(tmp_path, caplog):
    save(tmp_path, 1)
    (tmp_path / "step-000000001" / "notes.txt").write_text("mine")
    with caplog.at_level(logging.WARNING, "mirror"):
        save(tmp_path, 2, 3, 4, max_to_keep=1)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/step-000000001 stays: it has 'notes.txt', which no checkpoint writes; its "
        "checkpoint is removed"
    ]
    assert sorted(os.listdir(tmp_path)) == ["step-000000001", "step-000000004"]
    assert os.listdir(tmp_path / "step-000000001") == ["notes.txt"]


def test_a_stray_link_with_a_temporary_name_is_removed(tmp_path):
    fill(tmp_path / "data", FILE_NAME, "thesis")
    (tmp_path / ".step-000000001.tmp-0123").symlink_to("data")
    (tmp_path / ".last.tmp-0123").symlink_to("data")
    save(tmp_path, 1)
    save_in_place(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == ["data", "last", "step-000000001"]
    assert sorted(os.listdir(tmp_path / "data")) == [FILE_NAME, "thesis"]


@pytest.mark.parametrize("kind", ["link", "checkpoint", "directory"])
@pytest.mark.parametrize("at", range(1, 7))
def test_a_directory_that_is_swapped_meanwhile_loses_nothing(tmp_path, monkeypatch, kind, at):
    """At each call of ``os`` after the first, another process puts something else in its place."""
    save(tmp_path, 1)
    save(tmp_path / "other", 7)
    fill(tmp_path / "data", FILE_NAME, "thesis")
    path, calls = tmp_path / "step-000000001", itertools.count()
    there = {"checkpoint": tmp_path / "other" / "step-000000007", "directory": tmp_path / "data"}
    moved = tmp_path / "moved"

    def swap():
        if not os.path.lexists(path):
            return  # it has been renamed; the temporary name is random, and nobody knows it
        path.rename(moved)
        if kind == "link":
            path.symlink_to("data")
        else:
            there[kind].rename(path)

    class Swapping:
        def __getattr__(self, name):
            if name in ("open", "listdir", "rename", "lstat", "unlink", "rmdir") and (
                next(calls) == at
            ):
                swap()
            return getattr(os, name)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_directory, "os", Swapping())
        with contextlib.suppress(OSError):
            remove_checkpoint(path)
    others = {"link": tmp_path / "data", **there}
    if kind != "link" and moved.exists():
        others[kind] = path
    assert sorted(os.listdir(others["directory"])) == [FILE_NAME, "thesis"]
    assert mirror.Checkpoint(x=0).restore(others["checkpoint"]) == {"x": 7}
    assert sorted(os.listdir(tmp_path / "data" if kind == "link" else others[kind])) in (
        [FILE_NAME],
        [FILE_NAME, "thesis"],
    )
