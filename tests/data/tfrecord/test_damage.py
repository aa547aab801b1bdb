"""Damaged records are errors, or are skipped and noted; the rest is read."""

import pytest

from mirror.data import (
    RecordError,
    TFRecordDataset,
)
from tests.data.tfrecord.records import ALL, RECORD_BYTES, flip, write


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
