"""A state resumes after every record, in workers too."""

import json

import pytest

from mirror.data import (
    TFRecordDataset,
    TFRecordStream,
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
