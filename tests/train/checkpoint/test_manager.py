"""The checkpoint manager: which steps it keeps, and saves that overlap training."""

import errno
import fcntl
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch

import mirror
from mirror.train.checkpoint import checkpoint as module
from mirror.train.checkpoint.checkpoint_directory import FILE_NAME, locking


def manager(directory, value=0, **options):
    return mirror.CheckpointManager(mirror.Checkpoint(x=value), directory, **options)


def save(directory, *steps, **options):
    for step in steps:
        manager(directory, step, **options).save(step)


def restored(directory):
    one = manager(directory)
    step = one.restore_latest()
    return step, one.checkpoint.objects["x"]


def steps(directory):
    return [int(step) for step in manager(directory).steps]


def test_the_newest_is_restored_by_number_not_by_name(tmp_path):
    save(tmp_path, 9, 10, 1_000_000_001, 99)
    assert steps(tmp_path) == [9, 10, 99, 1_000_000_001]
    assert restored(tmp_path) == (1_000_000_001, 1_000_000_001)


def test_without_any_there_is_none(tmp_path):
    assert restored(tmp_path / "absent") == (None, 0)
    assert manager(tmp_path).latest is None


def test_the_latest_is_a_number_and_a_path(tmp_path):
    saved = manager(tmp_path / "a" / "b", 5).save(5)
    latest = manager(tmp_path / "a" / "b").latest
    assert latest == saved == 5
    assert latest.path == Path(latest) == tmp_path / "a" / "b" / "step-000000005"
    assert mirror.Checkpoint(x=0).restore(latest) == {"x": 5}


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4]), (None, [1, 2, 3, 4])]
)
def test_the_newest_are_kept(tmp_path, keep, left):
    save(tmp_path, 1, 2, 3, 4, max_to_keep=keep)
    assert steps(tmp_path) == left


def test_what_was_just_saved_is_never_removed(tmp_path):
    save(tmp_path, 8, 9, max_to_keep=2)
    save(tmp_path, 3, max_to_keep=2)
    assert steps(tmp_path) == [3, 9]
    save(tmp_path, 3, max_to_keep=1)
    assert steps(tmp_path) == [3]


def test_a_step_is_saved_again_in_its_place(tmp_path):
    save(tmp_path, 3)
    manager(tmp_path, "again").save(3)
    assert restored(tmp_path) == (3, "again")
    assert os.listdir(manager(tmp_path).latest.path) == [FILE_NAME]


def damage(path, how):
    file = path / FILE_NAME
    if how == "cut":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.write_bytes(file.read_bytes().replace(b"tensors", b"Tensors", 1))


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_damaged_one_is_skipped_with_a_warning(tmp_path, how):
    save(tmp_path, 1, 2, 3)
    damage(manager(tmp_path).latest.path, how)
    with pytest.warns(UserWarning, match="step 2 is restored: .*step-000000003"):
        assert restored(tmp_path) == (2, 2)


def test_a_directory_without_the_file_is_not_a_checkpoint(tmp_path):
    save(tmp_path, 1, 2, 3)
    (manager(tmp_path).latest.path / FILE_NAME).unlink()
    assert restored(tmp_path) == (2, 2)


def test_if_all_are_damaged_nothing_starts_again_silently(tmp_path):
    save(tmp_path, 1, 2)
    for step in manager(tmp_path).steps:
        damage(step.path, "cut")
    with pytest.raises(mirror.CheckpointError, match=r"no checkpoint in .* is whole"):
        restored(tmp_path)


def test_one_of_other_objects_is_not_skipped(tmp_path):
    save(tmp_path, 1)
    mirror.CheckpointManager(mirror.Checkpoint(y=1), tmp_path).save(2)
    with warnings.catch_warnings(), pytest.raises(mirror.CheckpointError, match="lacks 'x'"):
        warnings.simplefilter("error")
        restored(tmp_path)


def test_other_files_stay_and_are_in_nobodys_way(tmp_path):
    (tmp_path / "step-7").mkdir()
    names = ("step-x", "step-1", ".step-notes", "step-0000", "step-7/notes")
    mine = [tmp_path / name for name in names]
    for path in mine:
        path.write_text("mine")
    save(tmp_path, 2, 3, max_to_keep=1)
    assert steps(tmp_path) == [3]
    assert all(path.read_text() == "mine" for path in mine)


def write_half(directory):
    """Leaves in a directory what a save leaves that is killed while it writes."""
    directory.mkdir(exist_ok=True)
    left = directory / f".{FILE_NAME}.tmp-0123"
    left.write_text("half")
    return left


def test_leftovers_of_killed_saves_and_removals_are_removed(tmp_path):
    save(tmp_path, 3)
    for name in ("step-000000003", ".step-000000001.tmp-0123"):
        write_half(tmp_path / name)
    (tmp_path / ".step-000000002.tmp-0123").mkdir()
    save(tmp_path, 4)
    assert sorted(os.listdir(tmp_path)) == ["step-000000003", "step-000000004"]
    assert os.listdir(tmp_path / "step-000000003") == [FILE_NAME]


def test_what_another_process_writes_is_left_alone(tmp_path):
    writing = write_half(tmp_path / ".step-000000001.tmp-0123")
    with locking(writing.parent):
        save(tmp_path, 2)
    assert writing.exists()


def test_a_background_save(tmp_path):
    with manager(tmp_path, torch.ones(10), max_to_keep=1) as one:
        one.save(1, wait=False)
        one.save(2, wait=False)
        assert steps(tmp_path) in ([1], [2], [1, 2])
    assert steps(tmp_path) == [2]


def test_restoring_waits_for_the_save(tmp_path):
    one = manager(tmp_path, 4)
    one.save(4, wait=False)
    assert one.restore_latest() == 4


@pytest.mark.parametrize("step", [-1, True, 10**18])
def test_a_step_that_is_no_count_is_refused(tmp_path, step):
    with pytest.raises(ValueError, match="number of steps done"):
        manager(tmp_path).save(step)


def test_what_is_no_option_is_refused(tmp_path):
    for keep in (0, -1, True, 2.0, "5"):
        with pytest.raises(ValueError, match="max_to_keep"):
            manager(tmp_path, max_to_keep=keep)
    with pytest.raises(TypeError, match=r"takes a mirror.Checkpoint"):
        mirror.CheckpointManager({"x": 1}, tmp_path)
    with pytest.raises(TypeError):
        manager(tmp_path).save(1.5)


def test_the_directory_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link", 1, 2)
    assert restored(tmp_path / "link") == restored(tmp_path / "real") == (2, 2)


def test_saves_go_on_where_directories_can_be_neither_locked_nor_synced(tmp_path, monkeypatch):
    def impossible(*_):
        raise OSError(errno.EBADF, "as on NFS")

    left = write_half(tmp_path / ".step-000000001.tmp-0123")
    monkeypatch.setattr(fcntl, "flock", impossible)
    save(tmp_path, 1, 2)
    assert restored(tmp_path) == (2, 2)
    assert left.exists()  # another process may still write there


def test_a_background_save_completes_after_the_program_ends(tmp_path):
    one = manager(tmp_path, 1)
    one.save(1, wait=False)
    assert not one.checkpoint._in_flight._thread.daemon  # Python waits for such
    one.wait()


@pytest.fixture
def held(monkeypatch):
    """Holds back what is written until the event is set."""
    event = threading.Event()
    write = module.write_contents

    def waiting(*args):
        event.wait()
        write(*args)

    monkeypatch.setattr(module, "write_contents", waiting)
    return event


def test_a_background_save_has_the_values_at_its_call(tmp_path, held, leaks):
    tensor = torch.zeros(3)
    checkpoint = mirror.Checkpoint(t=tensor, l=[1])
    checkpoint.save(tmp_path / "c", wait=False)
    tensor.add_(1)
    checkpoint.objects["l"].append(2)
    held.set()
    checkpoint.wait()
    assert checkpoint.restore(tmp_path / "c")["l"] == [1]
    assert tensor.tolist() == [0, 0, 0]
    assert leaks.threads() == []


@pytest.mark.parametrize("then", ["save", "restore", "wait"])
def test_an_error_of_a_background_save_is_raised_by_the_next_call(tmp_path, then, caplog):
    (tmp_path / "c").write_text("mine")
    checkpoint = mirror.Checkpoint(x=1)
    checkpoint.save(tmp_path / "c", wait=False)
    calls = {"wait": checkpoint.wait}
    calls["save"] = lambda: checkpoint.save(tmp_path / "other")
    calls["restore"] = lambda: checkpoint.restore(tmp_path / "c")
    with pytest.raises(mirror.CheckpointError, match="it is a file"):
        calls[then]()
    assert "was not written" in caplog.text
    checkpoint.save(tmp_path / "other")  # it is told once


def test_one_save_is_in_flight(tmp_path, held):
    checkpoint = mirror.Checkpoint(x=1)
    checkpoint.save(tmp_path / "a", wait=False)
    threading.Timer(0.05, held.set).start()
    checkpoint.save(tmp_path / "b", wait=False)  # waits for the first one
    assert (tmp_path / "a" / FILE_NAME).exists()
    checkpoint.wait()
    assert (tmp_path / "b" / FILE_NAME).exists()


def test_memory_of_copies_is_used_again(tmp_path):
    checkpoint = mirror.Checkpoint(t=torch.ones(1000))
    for _ in range(2):
        checkpoint.save(tmp_path / "c", wait=False)
        checkpoint.wait()
    memory = [copy.data_ptr() for copy in checkpoint._copies._copies]
    checkpoint.save(tmp_path / "c", wait=False)
    assert [copy.data_ptr() for copy in checkpoint._copies._copies] == memory
    checkpoint.wait()
