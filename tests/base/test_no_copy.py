"""Files replaced as a whole, and objects that belong to one process."""

import copy
import io
import os
import pickle
from contextlib import contextmanager

import pytest
import torch

import mirror
from mirror.base import safe_files
from mirror.base.safe_files import replace_atomically

# What is short


class Own(mirror.comm.Communicator):
    """Of a user."""

    def all_reduce(self, tensors, op="sum", scale=1.0):
        pass

    broadcast = reduce_scatter = all_gather = all_reduce


def test_reprs_are_short_and_say_what_it_is(objects):
    strategy = objects["MirroredStrategy"]
    dataset = strategy.distribute_dataset([torch.zeros(1000)] * 3)
    iterator = iter(dataset)
    next(iterator)
    assert repr(strategy) == "MirroredStrategy([cpu, cpu], backend='host')"
    assert repr(dataset) == "DistributedDataset(list of 3 batches, [cpu, cpu])"
    assert repr(iterator) == f"DistributedIterator(1 delivered, of {dataset!r})"
    assert repr(strategy.distribute_dataset(iter([]))) == (
        "DistributedDataset(list_iterator, [cpu, cpu])"
    )
    assert repr(objects["ReplicaContext"]) == "ReplicaContext(replica 0 of 2 (cpu))"
    values = strategy.distribute_values_from_function(repr)
    assert values.values[1] == "ValueContext(replica 1 of 2)"
    communicator = mirror.comm.create("ring", ["cpu"] * 2)
    assert repr(communicator) == "RingCommunicator([cpu, cpu])"
    communicator.close()
    assert repr(communicator) == "RingCommunicator([cpu, cpu]) (closed)"
    for options in (mirror.InputOptions(), mirror.CommunicationOptions()):
        assert len(repr(options)) < 120


# What is neither copied nor pickled


def _torch_save(value):
    torch.save(value, io.BytesIO())


@pytest.mark.parametrize(
    "copier", [copy.copy, copy.deepcopy, pickle.dumps, _torch_save], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("MirroredStrategy", "make a strategy in each process"),
        ("ReplicaContext", r"mirror\.get_replica_context\(\)"),
        ("DistributedDataset", r"state_dict\(\)"),
        ("DistributedIterator", r"state_dict\(\)"),
        ("HostCommunicator", r"mirror\.comm\.create"),
        ("Own", r"mirror\.comm\.create"),
    ],
)
def test_what_belongs_to_a_process_says_so(objects, kind, remedy, copier):
    value = {
        **objects,
        "DistributedIterator": iter(objects["DistributedDataset"]),
        "HostCommunicator": mirror.comm.create("host", ["cpu"] * 2),
        "Own": Own(["cpu"]),
    }[kind]
    for held in (value, [value]) if copier is not copy.copy else (value,):
        with pytest.raises(TypeError, match=rf"a {kind} belongs to the process.*{remedy}"):
            copier(held)


def test_options_and_values_are_copied_and_pickled():
    for value in (mirror.InputOptions(prefetch=5), mirror.CommunicationOptions()):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
    values = pickle.loads(pickle.dumps(mirror.PerReplica([1, 2])))
    assert values.values == (1, 2)


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def content(path):
    with replace_atomically(path) as file:
        file.write(b"new")


def test_a_file_is_the_old_one_until_the_end_then_the_new_one(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with replace_atomically(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        assert len(list(tmp_path.iterdir())) == 2
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(error), replace_atomically(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_is_missing_or_a_target_that_is_one_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        content(tmp_path / "none" / "a")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        content(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(("mode", "mask", "got"), [(0o666, 0o022, 0o644), (0o640, 0o077, 0o600)])
def test_the_mode_is_the_one_asked_for_less_the_umask(tmp_path, mode, mask, got):
    with umask(mask), replace_atomically(tmp_path / "a", mode) as file:
        file.write(b"")
    assert (tmp_path / "a").stat().st_mode & 0o777 == got


def test_no_link_is_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    target = tmp_path / "target"
    target.symlink_to(victim)
    content(target)
    assert (victim.read_bytes(), target.read_bytes()) == (b"precious", b"new")
    monkeypatch.setattr(safe_files.secrets, "token_hex", lambda size: "guessed")
    waiting = tmp_path / "target.guessed.tmp"
    waiting.symlink_to(victim)
    with pytest.raises(FileExistsError):
        content(target)
    assert victim.read_bytes() == b"precious"
    assert waiting.is_symlink()


def test_a_trace_does_not_write_where_a_link_was_laid_for_it(tmp_path, make_strategy):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in (f"trace.json.{os.getpid()}.tmp", "trace.json.tmp"):
        (tmp_path / name).symlink_to(victim)
    strategy = make_strategy()
    with strategy.trace(tmp_path / "trace.json"):
        strategy.run(lambda: None)
    assert victim.read_bytes() == b"precious"
    assert (tmp_path / "trace.json").read_bytes().startswith(b"{")
