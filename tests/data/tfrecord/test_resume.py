"""Records are shared by workers, and a state resumes after every record."""

import json

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset

from mirror.data import (
    FixedLenFeature,
    RecordError,
    TFRecordDataset,
    TFRecordStream,
    TFRecordWriter,
    serialize_example,
)
from tests.data.tfrecord.records import (
    ALL,
    COMPRESSIONS,
    RECORD_BYTES,
    flip,
    write,
)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("shard", [(1, 0), (3, 1)])
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
@pytest.mark.parametrize("compression", [None, "GZIP"])
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
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("num_workers", [1, 2])
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
