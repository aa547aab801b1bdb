"""Files of records: writing, checksums, the index, damaged records."""

import gzip
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from mirror.data import (
    RecordError,
    TFRecordDataset,
    TFRecordWriter,
    serialize_example,
)
from mirror.data.tfrecord.record_reader import crc32c_function, masked_crc32c
from tests.data.tfrecord.files.values import RECORDS
from tests.data.tfrecord.records import ALL, RECORD_BYTES, flip, write

FILES = Path(__file__).parent / "files"
COMPRESSIONS = [None, "GZIP", "ZLIB"]


def write_file(path, records, compression=None):
    with TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)


def test_we_write_the_bytes_that_tensorflow_does(tmp_path):
    path = tmp_path / "ours.tfrecord"
    write_file(path, RECORDS)
    assert path.read_bytes() == (FILES / "records.tfrecord").read_bytes()


def test_compressed_bytes_are_those_that_tensorflow_does_decompressed(tmp_path):
    expected = (FILES / "records.tfrecord").read_bytes()
    write_file(tmp_path / "ours.gz", RECORDS, "GZIP")
    write_file(tmp_path / "ours.zlib", RECORDS, "ZLIB")
    assert gzip.decompress((tmp_path / "ours.gz").read_bytes()) == expected
    assert zlib.decompress((tmp_path / "ours.zlib").read_bytes()) == expected


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("records", [[], [b""], RECORDS, [b"x" * 2**20] * 3])
def test_what_is_written_comes_back(tmp_path, records, compression):
    path = tmp_path / "ours.tfrecord"
    write_file(path, records, compression)
    assert list(TFRecordDataset(path, compression)) == records


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_tensorflow_reads_what_we_write(tmp_path, compression):
    tf = pytest.importorskip("tensorflow")
    example = {"i": np.arange(-500, 500), "f": [0.5, -1.5], "b": [b"\x00", b""]}
    path = tmp_path / "ours.tfrecord"
    write_file(path, [*RECORDS, serialize_example(example)], compression)
    *found, last = tf.data.TFRecordDataset(str(path), compression or "").as_numpy_iterator()
    assert found == RECORDS
    parsed = tf.train.Example.FromString(last).features.feature
    assert list(parsed["i"].int64_list.value) == list(range(-500, 500))
    assert list(parsed["f"].float_list.value) == [0.5, -1.5]
    assert list(parsed["b"].bytes_list.value) == [b"\x00", b""]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_was_flushed_is_read_by_others(tmp_path, compression):
    path = tmp_path / "ours.tfrecord"
    with TFRecordWriter(path, compression) as writer:
        writer.write(b"first")
        writer.flush()
        assert next(iter(TFRecordDataset(path, compression))) == b"first"


def test_what_was_written_before_an_error_is_whole(tmp_path):
    path = tmp_path / "ours.tfrecord"
    with pytest.raises(KeyError), TFRecordWriter(path, "GZIP") as writer:
        writer.write(b"first")
        raise KeyError
    assert list(TFRecordDataset(path, "GZIP")) == [b"first"]


def test_records_are_bytes_of_any_kind(tmp_path):
    path = tmp_path / "ours.tfrecord"
    write_file(path, [bytearray(b"a"), memoryview(b"b")])
    assert list(TFRecordDataset(path)) == [b"a", b"b"]
    with (
        TFRecordWriter(path) as writer,
        pytest.raises(TypeError, match="serialize features"),
    ):
        writer.write({"label": 3})


def test_a_closed_writer_writes_no_more(tmp_path):
    writer = TFRecordWriter(tmp_path / "ours.tfrecord", "ZLIB")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write(b"")


def test_an_unknown_compression_is_refused_before_the_file_is_made(tmp_path):
    with pytest.raises(ValueError, match="None, 'GZIP' or 'ZLIB'; got 'gzip'"):
        TFRecordWriter(tmp_path / "ours.tfrecord", "gzip")
    assert list(tmp_path.iterdir()) == []
    TFRecordWriter(tmp_path / "ours.tfrecord", "").close()


WITHOUT = """
import sys
sys.modules["google_crc32c"] = None
from mirror.data import TFRecordDataset, TFRecordWriter
for make in (TFRecordDataset, TFRecordWriter):
    try:
        make(sys.argv[1])
    except ImportError as error:
        print(error)
"""


def test_the_checksum_is_that_of_rfc_3720():
    assert crc32c_function()(b"\x00" * 32) == 0x8A9136AA
    assert crc32c_function()(b"\xff" * 32) == 0x62A8AB43
    assert crc32c_function()(bytes(range(32))) == 0x46DD794E


def test_the_mask_rotates_by_15_bits_and_adds():
    assert masked_crc32c(b"\x00" * 32) == (0x6D551522 + 0xA282EAD8) % 2**32


def test_without_the_package_the_extra_is_named_and_no_file_is_made(script_pool, tmp_path):
    path = tmp_path / "a.tfrecord"
    done = script_pool.run(WITHOUT, path)
    messages = done.stdout.splitlines()
    assert len(messages) == 2
    assert all("pip install 'mirror-strategy[tfrecord]'" in message for message in messages)
    assert not path.exists()


def test_damaged_records_are_skipped_and_noted_once(paths):
    flip(paths[0], RECORD_BYTES + 12)  # the data of record 1
    flip(paths[2], 0)  # the length of record 3
    with open(paths[4], "ab") as file:
        file.write(b"cut")
    intact = [record for record in ALL if record not in (b"1", b"3")]
    dataset = TFRecordDataset(paths, on_damage="skip")
    assert dataset.damaged_records == ()
    assert [record for record in dataset] == intact  # noqa: C416  # list() would take the length
    in_order = sorted((e.path, e.record, e.offset) for e in dataset.damaged_records)
    assert in_order == [(str(paths[0]), 1, 17), (str(paths[2]), 0, 0), (str(paths[4]), 4, 71)]
    assert len(dataset) == len(intact)
    assert [dataset[i] for i in range(len(dataset))] == intact
    assert len(dataset.damaged_records) == 3
    by_number = TFRecordDataset(paths, on_damage="skip")
    assert len(by_number) == len(intact)
    assert sorted((e.path, e.record, e.offset) for e in by_number.damaged_records) == in_order


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_shards_of_damaged_files_are_the_same_by_number_and_in_order(paths, num_shards):
    flip(paths[0], RECORD_BYTES + 12)
    flip(paths[2], 0)
    dataset = TFRecordDataset(paths, on_damage="skip")
    found = []
    for index in range(num_shards):
        shard = dataset.shard(num_shards, index)
        by_number = [shard[i] for i in range(len(shard))]
        assert by_number == [record for record in shard]  # noqa: C416
        found += by_number
    assert sorted(found, key=int) == [record for record in ALL if record not in (b"1", b"3")]


def test_damaged_compression_loses_the_rest_of_its_file_only(tmp_path):
    paths = write(tmp_path, "GZIP")
    paths[2].write_bytes(paths[2].read_bytes()[:-4])
    dataset = TFRecordDataset(paths, "GZIP", on_damage="skip")
    assert list(dataset) == ALL
    ((path, record),) = [(error.path, error.record) for error in dataset.damaged_records]
    assert (path, record) == (str(paths[2]), 5)


def test_another_compression_is_never_skipped(paths):
    dataset = TFRecordDataset(paths, "GZIP", on_damage="skip")
    with pytest.raises(RecordError, match="'GZIP'; from its first bytes it is compression=None"):
        list(dataset)


def index_path(path):
    return Path(f"{path}.index.npy")


def indexed(paths, **options):
    dataset = TFRecordDataset(paths, save_index=True, **options)
    return [dataset[i] for i in range(len(dataset))]


def test_no_index_is_kept_unless_asked(paths):
    assert len(TFRecordDataset(paths)) == 13
    assert not any(index_path(path).exists() for path in paths)


def test_a_kept_index_is_used(paths, monkeypatch):
    assert indexed(paths) == ALL
    assert {path.name for path in paths[0].parent.iterdir()} == {
        name for path in paths for name in (path.name, index_path(path).name)
    }
    monkeypatch.setattr("mirror.data.tfrecord.record_index.scan", None)
    assert indexed(paths) == ALL


def test_a_kept_index_is_as_readable_as_its_file(paths):
    paths[0].chmod(0o640)
    indexed(paths[0])
    assert index_path(paths[0]).stat().st_mode & 0o777 == 0o640


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
    good = index_path(paths[0]).read_bytes()
    spoil(index_path(paths[0]))
    assert indexed(paths) == ALL
    assert index_path(paths[0]).read_bytes() == good


def test_an_index_of_lengths_is_not_used_where_damage_is_skipped(paths):
    flip(paths[0], RECORD_BYTES + 12)
    assert len(TFRecordDataset(paths, save_index=True)) == 13
    assert len(indexed(paths, on_damage="skip")) == 12
    flip(paths[0], RECORD_BYTES + 12)
    assert indexed(paths, on_damage="skip") == ALL
    assert indexed(paths) == ALL


def test_an_index_that_cannot_be_written_is_an_error_and_leaves_nothing(paths, monkeypatch):
    def refuse(source, target):
        raise PermissionError("read-only")

    monkeypatch.setattr("mirror.base.safe_files.os.replace", refuse)
    with pytest.raises(PermissionError, match="read-only"):
        indexed(paths)
    assert sorted(path.name for path in paths[0].parent.iterdir()) == [p.name for p in paths]
