"""mirror/data/tfrecord/record_writer.py: the bytes TensorFlow writes, and what it reads."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest

from mirror.data import TFRecordDataset, TFRecordWriter, serialize_example
from tests.data.tfrecord.files.values import RECORDS

FILES = Path(__file__).parent / "files"
COMPRESSIONS = [None, "GZIP", "ZLIB"]


def write(path, records, compression=None):
    with TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)


def test_we_write_the_bytes_that_tensorflow_does(tmp_path):
    path = tmp_path / "ours.tfrecord"
    write(path, RECORDS)
    assert path.read_bytes() == (FILES / "records.tfrecord").read_bytes()


def test_compressed_bytes_are_those_that_tensorflow_does_decompressed(tmp_path):
    expected = (FILES / "records.tfrecord").read_bytes()
    write(tmp_path / "ours.gz", RECORDS, "GZIP")
    write(tmp_path / "ours.zlib", RECORDS, "ZLIB")
    assert gzip.decompress((tmp_path / "ours.gz").read_bytes()) == expected
    assert zlib.decompress((tmp_path / "ours.zlib").read_bytes()) == expected


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("records", [[], [b""], RECORDS, [b"x" * 2**20] * 3])
def test_what_is_written_comes_back(tmp_path, records, compression):
    path = tmp_path / "ours.tfrecord"
    write(path, records, compression)
    assert list(TFRecordDataset(path, compression)) == records


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_tensorflow_reads_what_we_write(tmp_path, compression):
    tf = pytest.importorskip("tensorflow")
    example = {"i": np.arange(-500, 500), "f": [0.5, -1.5], "b": [b"\x00", b""]}
    path = tmp_path / "ours.tfrecord"
    write(path, [*RECORDS, serialize_example(example)], compression)
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
    write(path, [bytearray(b"a"), memoryview(b"b")])
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
