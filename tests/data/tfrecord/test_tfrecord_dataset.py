"""tfrecord_dataset.py: access by number, in order and in shards; refused arguments."""

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from mirror.data import (
    FixedLenFeature,
    RecordError,
    TFRecordDataset,
    TFRecordStream,
    TFRecordWriter,
    parse_example,
    serialize_example,
)
from tests.data.tfrecord.records import ALL, COMPRESSIONS, FILES, RECORD_BYTES, flip, write

# by number


def test_records_are_read_by_number(paths):
    dataset = TFRecordDataset(paths)
    assert len(dataset) == 13
    assert [dataset[i] for i in range(13)] == ALL
    assert dataset[-1] == dataset[np.int64(12)] == dataset[torch.tensor(12)] == b"12"
    for index in (13, -14):
        with pytest.raises(IndexError, match=f"13 records; got index {index}"):
            dataset[index]
    with pytest.raises(TypeError):
        dataset[1.5]


def test_files_without_records_have_no_length(tmp_path):
    dataset = TFRecordDataset([FILES / "empty.tfrecord"] * 2)
    assert len(dataset) == 0
    assert list(dataset) == []
    with pytest.raises(IndexError):
        dataset[0]


def test_more_files_than_stay_open_are_read(paths, monkeypatch):
    monkeypatch.setattr("mirror.data.tfrecord.record_index.MAX_OPEN_FILES", 2)
    dataset = TFRecordDataset(paths)
    before = len(os.listdir("/proc/self/fd"))
    assert [dataset[i] for i in range(13)] == ALL
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del dataset
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_read_by_number_at_once(paths):
    dataset = TFRecordDataset(paths)
    found = {}
    barrier = threading.Barrier(4)

    def read(thread):
        barrier.wait()
        found[thread] = [dataset[i] for i in range(13)]

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), ALL)


def test_random_access_checks_lengths_and_data(paths):
    flip(paths[2], RECORD_BYTES + 12)
    dataset = TFRecordDataset(paths)
    assert dataset[3] == b"3"
    with pytest.raises(
        RecordError, match=r"2.tfrecord, record 1 at byte 17: its 1 bytes"
    ) as caught:
        dataset[4]
    assert (caught.value.path, caught.value.record) == (str(paths[2]), 1)
    flip(paths[2], RECORD_BYTES)
    with pytest.raises(RecordError, match=r"2.tfrecord, record 1 at byte 17: its length"):
        len(TFRecordDataset(paths))


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compressed_files_have_no_random_access(tmp_path, compression):
    dataset = TFRecordDataset(write(tmp_path, compression), compression)
    assert isinstance(dataset, TFRecordStream)
    assert isinstance(dataset, IterableDataset)
    assert list(dataset) == ALL
    with pytest.raises(TypeError, match=f"{compression!r} can only be read.*no access by number"):
        dataset[0]
    with pytest.raises(TypeError, match="has no length"):
        len(dataset)


# in order


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_records_come_in_order_again_and_again(tmp_path, compression):
    dataset = TFRecordDataset(write(tmp_path, compression), compression)
    assert [list(iter(dataset)), list(iter(dataset))] == [ALL, ALL]


def test_iterating_reads_no_index_and_no_further_than_asked(paths):
    flip(paths[2], 0)
    records = iter(TFRecordDataset(paths))
    assert [next(records) for _ in range(3)] == ALL[:3]
    with pytest.raises(RecordError, match=r"2.tfrecord, record 0"):
        next(records)


def test_one_path_needs_no_list(paths):
    for path in (paths[0], str(paths[0])):
        assert list(TFRecordDataset(path)) == ALL[:3]
    assert list(TFRecordDataset(path for path in paths[:3])) == ALL[:8]


def test_leaving_early_closes_the_file(paths):
    before = len(os.listdir("/proc/self/fd"))
    for _ in TFRecordDataset(paths):
        break
    assert len(os.listdir("/proc/self/fd")) == before


# shards


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("num_shards", [1, 2, 5, 20])
def test_shards_are_every_nth_record(tmp_path, compression, num_shards):
    dataset = TFRecordDataset(write(tmp_path, compression), compression)
    for index in range(num_shards):
        shard = dataset.shard(num_shards, index)
        assert list(iter(shard)) == ALL[index::num_shards]
        if compression is None:
            assert [shard[i] for i in range(len(shard))] == ALL[index::num_shards]
    assert list(dataset) == ALL


def test_shards_of_shards_are_shards(paths):
    dataset = TFRecordDataset(paths)
    assert len(dataset) == 13  # the index is shared
    shard = dataset.shard(2, 1).shard(3, 2)
    assert list(iter(shard)) == [shard[i] for i in range(len(shard))] == ALL[1::2][2::3]


@pytest.mark.parametrize(("num_shards", "index"), [(0, 0), (2, 2), (2, -1)])
def test_a_shard_that_is_none_is_refused(paths, num_shards, index):
    with pytest.raises(ValueError, match=f"got {index} of {num_shards}"):
        TFRecordDataset(paths).shard(num_shards, index)


# what records become


def test_features_are_parsed_before_the_transform(tmp_path):
    path = tmp_path / "a.tfrecord"
    with TFRecordWriter(path) as writer:
        writer.write(serialize_example({"label": 3, "more": 4}))
    features = {"label": FixedLenFeature((), int)}
    summary = TFRecordDataset(path, features=features, transform=lambda e: (list(e), e["label"]))
    assert summary[0] == next(iter(summary)) == (["label"], 3)
    assert TFRecordDataset(path, transform=len)[0] == len(TFRecordDataset(path)[0])


@pytest.mark.parametrize("on_damage", ["raise", "skip"])
def test_a_record_that_does_not_parse_is_never_skipped(paths, on_damage):
    for options in ({"features": {}}, {"transform": parse_example}):
        dataset = TFRecordDataset(paths[:3], on_damage=on_damage, **options)
        with pytest.raises(RecordError, match=r"0.tfrecord, record 0 at byte 0: malformed"):
            next(iter(dataset))
        with pytest.raises(RecordError, match=r"2.tfrecord, record 4 at byte 68: malformed"):
            dataset[7]


def test_an_error_of_the_transform_is_the_users_own(paths):
    with pytest.raises(ZeroDivisionError):
        TFRecordDataset(paths, transform=lambda record: 1 / int(record))[0]


# the object


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_a_dataset_can_be_pickled(tmp_path, compression):
    dataset = TFRecordDataset(write(tmp_path, compression), compression, on_damage="skip")
    if compression is None:
        assert dataset[12] == b"12"
    again = pickle.loads(pickle.dumps(dataset))
    assert type(again) is type(dataset)
    assert list(again) == ALL
    if compression is None:
        assert again[12] == b"12"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "what"),
    [
        (["no/such"], {}, FileNotFoundError, "'no/such' is none"),
        (["no/*.tfrecord"], {}, FileNotFoundError, "glob"),
        ([Path()], {}, FileNotFoundError, "is none"),
        ([[]], {}, ValueError, "at least one path"),
        ([None], {}, TypeError, "paths are .* got None"),
        ([b"x"], {}, TypeError, "paths are .* got b'x'"),
        ([[b"x"]], {}, TypeError, "paths are"),
        ([FILES / "empty.tfrecord"], {"features": {"x": "int64"}}, TypeError, "features are"),
        ([FILES / "empty.tfrecord"], {"features": ["x"]}, TypeError, "features are"),
        ([FILES / "empty.tfrecord"], {"transform": 5}, TypeError, "transform is a function"),
        ([FILES / "empty.tfrecord", "LZ4"], {}, ValueError, "'GZIP' or 'ZLIB'; got 'LZ4'"),
        ([FILES / "empty.tfrecord"], {"on_damage": "ignore"}, ValueError, "got 'ignore'"),
    ],
)
def test_what_cannot_be_is_refused_at_once(arguments, options, error, what):
    with pytest.raises(error, match=what):
        TFRecordDataset(*arguments, **options)


def test_an_empty_compression_is_none_as_in_tensorflow(paths):
    assert TFRecordDataset(paths, "")[0] == b"0"


def test_no_tensorflow_and_no_protobuf_is_imported(paths):
    program = (
        "import sys; from mirror.data import TFRecordDataset; "
        f"print(len(TFRecordDataset({str(paths[0])!r}))); "
        "print([m for m in sys.modules if m.startswith(('tensorflow', 'google.protobuf'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["3", "[]"]
