"""tfrecord_dataset.py: access by number, in order and in shards; refused arguments."""

import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

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
from tests.pairs import each_once, quick_of

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


@each_once(num_shards=[1, 2, 5, 20], compression=COMPRESSIONS)
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


# Resuming: after every batch, and by workers


@each_once(shard=[(1, 0), (3, 1)], compression=COMPRESSIONS)
def test_a_state_resumes_after_every_record(tmp_path, compression, shard):
    paths = write(tmp_path, compression)

    def dataset():
        return TFRecordDataset(paths, compression).shard(*shard)

    whole = list(iter(dataset()))
    for count in range(len(whole) + 1):
        first, second = dataset(), dataset()
        records = iter(first)
        assert [next(records) for _ in range(count)] == whole[:count]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert list(iter(second)) == whole[count:]
        assert list(iter(second)) == whole


def test_a_state_resumes_behind_skipped_damage(paths):
    flip(paths[0], RECORD_BYTES + 12)
    flip(paths[2], 0)
    whole = [record for record in ALL if record not in (b"1", b"3")]
    for count in range(len(whole) + 1):
        first = TFRecordDataset(paths, on_damage="skip")
        records = iter(first)
        assert [next(records) for _ in range(count)] == whole[:count]
        second = TFRecordDataset(paths, on_damage="skip")
        second.load_state_dict(first.state_dict())
        assert [record for record in second] == whole[count:]  # noqa: C416


def test_the_state_of_a_finished_epoch_is_the_begin_of_the_next(paths):
    dataset = TFRecordDataset(paths)
    begin = dataset.state_dict()
    assert list(iter(dataset)) == ALL
    assert dataset.state_dict() == begin
    dataset.load_state_dict(begin)
    assert list(iter(dataset)) == ALL


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_a_worker_resumes_its_own_state_only(tmp_path, as_worker, compression):
    dataset = TFRecordDataset(write(tmp_path, compression), compression)
    as_worker(0, 2)
    whole = list(iter(dataset))
    records = iter(dataset)
    assert [next(records), next(records)] == whole[:2]
    state = dataset.state_dict()
    assert list(records) == whole[2:]
    at_its_end = dataset.state_dict()
    dataset.load_state_dict(at_its_end)
    assert list(iter(dataset)) == []
    assert list(iter(dataset)) == whole
    dataset.load_state_dict(state)
    assert list(iter(dataset)) == whole[2:]
    for worker_id, num_workers in ((1, 2), (0, 3), (None, None)):
        as_worker(worker_id, num_workers)
        dataset.load_state_dict(state)
        with pytest.raises(ValueError, match="by the same DataLoader worker"):
            next(iter(dataset))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("compression", quick_of([None, "GZIP"], ["GZIP"]))
def test_torchdatas_loader_resumes_after_every_batch(tmp_path, compression):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    dataset = TFRecordStream(write(tmp_path, compression), compression)

    def loader():
        options = {"num_workers": 2, "multiprocessing_context": "fork"}
        return stateful.StatefulDataLoader(dataset, batch_size=2, **options)

    whole = list(loader())
    assert sorted((record for batch in whole for record in batch), key=int) == ALL
    for count in range(len(whole)):
        first, second = loader(), loader()
        batches = iter(first)
        assert [next(batches) for _ in range(count)] == whole[:count]
        second.load_state_dict(first.state_dict())
        assert list(second) == whole[count:]


@pytest.mark.parametrize(
    "change",
    [{"file": 6}, {"file": -1}, {"file": None}, {"offset": -1}, {"number": "1"}, {"more": 0}],
)
def test_a_foreign_state_is_refused(paths, change):
    dataset = TFRecordDataset(paths)
    with pytest.raises(ValueError, match="no state of a TFRecordDataset of 5 files"):
        dataset.load_state_dict({**dataset.state_dict(), **change})
    with pytest.raises(ValueError, match="no state of a TFRecordDataset of 5 files: None"):
        dataset.load_state_dict(None)


class Wrapped(IterableDataset):
    """A user's own dataset around ours."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(self.dataset)


def loaded(dataset, num_workers, context=None, **options):
    options = {"batch_size": None, "multiprocessing_context": context, **options}
    return list(DataLoader(dataset, num_workers=num_workers, **options))


def test_a_loader_reads_by_number_in_order_and_shuffled(paths):
    assert loaded(TFRecordDataset(paths), 0) == ALL
    shuffled = loaded(TFRecordDataset(paths), 0, shuffle=True)
    assert shuffled != ALL
    assert sorted(shuffled, key=int) == ALL


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_by_number(paths, context):
    dataset = TFRecordDataset(paths)
    assert dataset[0] == b"0"  # a file is open when the workers start
    assert loaded(dataset, 2 if context == "fork" else 1, context) == ALL


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@each_once(num_workers=[1, 2], compression=COMPRESSIONS)
def test_workers_that_iterate_share_the_records(tmp_path, compression, num_workers):
    dataset = TFRecordStream(write(tmp_path, compression), compression)
    for wrap in (lambda d: d, Wrapped):
        assert sorted(loaded(wrap(dataset), num_workers, "fork"), key=int) == ALL
        shard = dataset.shard(2, 1)
        assert sorted(loaded(wrap(shard), num_workers, "fork"), key=int) == ALL[1::2]


@pytest.mark.parametrize(
    ("compression", "num_workers", "expected"),
    [
        (None, 3, [ALL[0::3], ALL[1::3], ALL[2::3]]),
        # Files 0 and 3, 1 and 4, 2: none is decompressed twice.
        ("GZIP", 3, [[*ALL[:3], ALL[8]], ALL[9:], ALL[3:8]]),
        ("GZIP", 6, [ALL[i::6] for i in range(6)]),
    ],
)
def test_workers_take_files_if_compressed_and_enough(
    tmp_path, as_worker, compression, num_workers, expected
):
    dataset = TFRecordStream(write(tmp_path, compression), compression)
    found = []
    for worker in range(num_workers):
        as_worker(worker, num_workers)
        found.append(list(iter(dataset)))
    assert found == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_error_in_a_worker_names_the_record(paths):
    flip(paths[2], RECORD_BYTES + 12)
    with pytest.raises(RecordError, match=r"2.tfrecord, record 1 at byte 17"):
        loaded(TFRecordDataset(paths), 1, "fork")


def test_batches_of_examples_are_collated(tmp_path):
    path = tmp_path / "a.tfrecord"
    with TFRecordWriter(path) as writer:
        for i in range(4):
            writer.write(serialize_example({"label": i, "x": np.full((2, 3), i / 2)}))
    features = {
        "label": FixedLenFeature((), np.int64),
        "x": FixedLenFeature((2, 3), np.float32),
    }
    dataset = TFRecordDataset(path, features=features)
    first, second = DataLoader(dataset, batch_size=3)
    assert first["label"].tolist() == [0, 1, 2]
    assert first["x"].shape == (3, 2, 3)
    assert second["x"].tolist() == [[[1.5] * 3] * 2]
