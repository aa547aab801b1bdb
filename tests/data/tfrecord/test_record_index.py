"""mirror/data/tfrecord/record_index.py: kept beside its file, made anew when it is not of it."""

import os
from pathlib import Path

import numpy as np
import pytest

from mirror.data import (
    TFRecordDataset,
    TFRecordWriter,
)
from tests.data.tfrecord.records import ALL, RECORD_BYTES, flip


def kept(path):
    return Path(f"{path}.index.npy")


def indexed(paths, **options):
    dataset = TFRecordDataset(paths, save_index=True, **options)
    return [dataset[i] for i in range(len(dataset))]


def test_no_index_is_kept_unless_asked(paths):
    assert len(TFRecordDataset(paths)) == 13
    assert not any(kept(path).exists() for path in paths)


def test_a_kept_index_is_used(paths, monkeypatch):
    assert indexed(paths) == ALL
    assert {path.name for path in paths[0].parent.iterdir()} == {
        name for path in paths for name in (path.name, kept(path).name)
    }
    monkeypatch.setattr("mirror.data.tfrecord.record_index.scan", None)
    assert indexed(paths) == ALL


def test_a_kept_index_is_as_readable_as_its_file(paths):
    paths[0].chmod(0o640)
    indexed(paths[0])
    assert kept(paths[0]).stat().st_mode & 0o777 == 0o640


def test_a_changed_file_gets_a_new_index(paths):
    indexed(paths)
    old = paths[0].stat()
    with TFRecordWriter(paths[0]) as writer:  # of the same size
        writer.write(b"12345678901234567890")
        writer.write(b"3")
    os.utime(paths[0], ns=(old.st_atime_ns, old.st_mtime_ns))
    grown = paths[0].read_bytes()[:-2] + b"??"
    assert len(grown) != old.st_size or indexed(paths)
    assert indexed(paths)[:2] == [b"12345678901234567890", b"3"]
    with TFRecordWriter(paths[0]) as writer:
        writer.write(b"12345678901234567891")
        writer.write(b"4")
    os.utime(paths[0], ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    assert indexed(paths)[:2] == [b"12345678901234567891", b"4"]


def archive(path):
    with path.open("wb") as file:
        np.savez(file, a=np.zeros(3))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b"another file"),
        lambda path: flip(path, path.stat().st_size - 8),
        lambda path: np.save(path, np.zeros(3)),
        lambda path: np.save(path, np.zeros(3, np.int64)),
        lambda path: np.save(path, np.array({"pickle": 1}, object), allow_pickle=True),
        archive,
    ],
)
def test_a_damaged_or_foreign_index_is_replaced(paths, spoil):
    indexed(paths)
    good = kept(paths[0]).read_bytes()
    spoil(kept(paths[0]))
    assert indexed(paths) == ALL
    assert kept(paths[0]).read_bytes() == good


def test_an_index_of_lengths_does_not_serve_who_skips_damage(paths):
    flip(paths[0], RECORD_BYTES + 12)
    assert len(TFRecordDataset(paths, save_index=True)) == 13
    assert len(indexed(paths, on_damage="skip")) == 12
    flip(paths[0], RECORD_BYTES + 12)
    assert indexed(paths, on_damage="skip") == ALL
    assert indexed(paths) == ALL


def test_an_index_that_cannot_be_written_is_an_error_and_leaves_nothing(paths, monkeypatch):
    def refuse(source, target):
        raise PermissionError("read-only")

    monkeypatch.setattr("mirror.base.atomic_file.os.replace", refuse)
    with pytest.raises(PermissionError, match="read-only"):
        indexed(paths)
    assert sorted(path.name for path in paths[0].parent.iterdir()) == [p.name for p in paths]
