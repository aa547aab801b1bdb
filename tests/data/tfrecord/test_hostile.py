"""Hostile files: a RecordError, bounded memory and bounded work."""

import contextlib
import gzip
import os
import random
import tracemalloc
import zlib

import numpy as np
import pytest

from mirror.data import RecordError, TFRecordDataset
from mirror.data.tfrecord import record_index, record_reader
from mirror.data.tfrecord.record_reader import FOOTER, HEADER, find_length, masked_crc32c
from tests.data.tfrecord.records import ALL, COMPRESSIONS, write

LENGTHS = [2**20, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def header(length):
    encoded = length.to_bytes(8, "little")
    return encoded + FOOTER.pack(masked_crc32c(encoded))


def record(data):
    return header(len(data)) + data + FOOTER.pack(masked_crc32c(data))


def save(path, content, compression=None):
    pack = {None: bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}[compression]
    path.write_bytes(pack(content))
    return path


def read_all(path, compression=None, on_damage="raise"):
    """Reads in order, of a shard, and where that can be by number; returns what came in order."""
    dataset = TFRecordDataset(path, compression, on_damage=on_damage)
    found, errors = [], []
    try:
        found += iter(dataset)
    except RecordError as error:
        errors.append(error)
    with contextlib.suppress(RecordError):
        list(iter(dataset.shard(2, 1)))
    if compression is None:
        with contextlib.suppress(RecordError):
            [dataset[i] for i in range(len(dataset))]
    return found, errors


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_length_that_the_file_does_not_have_is_an_error_and_takes_no_memory(
    tmp_path, length, compression
):
    path = save(tmp_path / "a", record(b"one") + header(length) + b"few", compression)
    read_all(path, compression)  # what is imported and remembered at first use
    tracemalloc.start()
    try:
        found, errors = read_all(path, compression)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == [b"one"]
    (error,) = errors
    assert (error.record, error.offset) == (1, 19)
    assert peak < 2**21
    assert read_all(path, compression, "skip") == ([b"one"], [])


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_little_that_inflates_to_much_is_refused_before_it_does(
    tmp_path, compression, monkeypatch
):
    monkeypatch.setattr(record_reader, "MAX_INFLATED_BYTES", 2**20)
    largest = record(bytes(2**20))
    path = save(tmp_path / "a", largest + record(bytes(2**24)), compression)
    assert path.stat().st_size < 2**15
    tracemalloc.start()
    try:
        found, errors = read_all(path, compression)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [len(data) for data in found] == [2**20]
    assert "at most 1048576 bytes" in str(errors[0])
    assert peak < 2**22 + 2**21
    assert len(read_all(path, compression, "skip")[0]) == 1


def first_length(window):
    return next(
        (
            i
            for i in range(len(window) - HEADER.size + 1)
            if window[i + 5 : i + 8] == bytes(3)
            and HEADER.unpack_from(window, i)[1] == masked_crc32c(window[i : i + 8])
        ),
        None,
    )


def test_a_search_finds_what_a_look_at_each_place_finds():
    draw = random.Random(0)
    for size in [*range(40), 500]:
        for _ in range(20):
            window = bytearray(draw.choices([0, 0, 0, 1, 255], k=size))
            if draw.random() < 0.7:
                length = draw.choice([0, 1, 255, 2**16, 2**40 - 1, 2**40, draw.getrandbits(40)])
                window[draw.randrange(size + 1) : 0] = header(length)
            assert find_length(bytes(window)) == first_length(bytes(window))


def test_what_is_searched_is_in_proportion_to_the_file_however_often_it_is_damaged(
    tmp_path, monkeypatch
):
    searched = []
    real = record_reader.find_length
    monkeypatch.setattr(
        record_reader, "find_length", lambda window: searched.append(len(window)) or real(window)
    )
    often = save(tmp_path / "often", (record(b"") + b"?") * 300)
    assert read_all(often, on_damage="skip") == ([b""] * 300, [])
    zeros = save(tmp_path / "zeros", record(b"one") + bytes(2**23))
    assert TFRecordDataset(zeros, on_damage="skip")[0] == b"one"
    assert sum(searched) < 3 * 2 * 300 * record_reader.FIRST_SCAN_BYTES + 2**23 + 2**20


def test_damage_without_end_is_an_error_even_where_damage_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(record_index, "MAX_DAMAGE", 10)
    monkeypatch.setattr("mirror.data.tfrecord.tfrecord_dataset.MAX_DAMAGE", 10)
    path = save(tmp_path / "a", (record(b"one")[:-1] + b"?") * 10)
    assert read_all(path, on_damage="skip") == ([], [])
    path = save(tmp_path / "a", (record(b"one")[:-1] + b"?") * 11)
    dataset = TFRecordDataset(path, on_damage="skip")
    for read in (list, len):
        with pytest.raises(RecordError, match="skips at most 10 damaged records"):
            read(iter(dataset) if read is list else dataset)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_damaged_anywhere_it_is_an_error_and_what_comes_is_intact(tmp_path, compression):
    (good,) = [path for path in write(tmp_path, compression) if path.name == "2.tfrecord"]
    content, draw = good.read_bytes(), random.Random(1)
    records = TFRecordDataset(good, compression)
    whole = [data for data in iter(records)]  # noqa: C416  # list() would take the length
    assert set(whole) <= set(ALL)
    for _ in range(150):
        bad = bytearray(content)
        for _ in range(draw.randint(1, 3)):
            begin = draw.randrange(len(bad) + 1)
            bad[begin : begin + draw.randint(0, 9)] = draw.randbytes(draw.randint(0, 9))
        good.write_bytes(bad)
        for on_damage in ("raise", "skip"):
            found, errors = read_all(good, compression, on_damage)
            assert set(found) <= set(whole)
            assert not errors or on_damage == "raise" or "does not have compr" in str(errors[0])


@pytest.fixture
def indexed_file(tmp_path):
    """A file with an index beside it, and a function that reads by that index."""
    path = write(tmp_path)[2]

    def read():
        dataset = TFRecordDataset(path, save_index=True)
        return [dataset[i] for i in range(len(dataset))]

    whole = read()
    assert len(whole) == 5
    return path.with_name(path.name + ".index.npy"), lambda: read() == whole


def test_an_index_that_is_cut_or_changed_anywhere_is_made_again(indexed_file):
    file, is_right = indexed_file
    good = file.read_bytes()
    for end in range(len(good)):
        file.write_bytes(good[:end])
        assert is_right()
        assert file.read_bytes() == good
    for place in range(len(good)):
        for bit in (0, 3, 7):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            file.write_bytes(bad)
            assert is_right()
            assert file.read_bytes() == good


def magic(text):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        magic(b"{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,), }"),
        magic(b"{'descr': '<i8', 'shape': ((((("),
        magic(b"(" * 5000),
        magic(b"{'descr': [('a', '<i8', (99999999999,))], 'fortran_order': False, 'shape': ()}"),
        b"PK\x03\x04 no archive",
        b"\x93NUMPY\x09\x09",
        bytes(100),
    ],
)
def test_an_index_that_others_wrote_is_not_even_parsed(indexed_file, content):
    file, is_right = indexed_file
    good = file.read_bytes()
    file.write_bytes(content)
    assert is_right()
    assert file.read_bytes() == good


def test_an_index_that_is_no_usual_file_is_not_read(indexed_file):
    file, is_right = indexed_file
    good = file.read_bytes()
    with file.open("r+b") as sparse:
        sparse.truncate(2**42)
    assert is_right()
    file.unlink()
    os.mkfifo(file)
    assert is_right()
    file.unlink()
    file.symlink_to("/dev/zero")
    assert is_right()
    assert file.read_bytes() == good


@pytest.mark.parametrize("offset", [-1, -(2**63), 2**62, 0, 5])
def test_an_index_with_offsets_that_no_file_has_is_made_again(indexed_file, offset):
    file, is_right = indexed_file
    good = file.read_bytes()
    values = np.load(file)
    values[record_index.NUM_FIELDS + 1] = offset
    values[3] = masked_crc32c(np.delete(values, 3).tobytes())
    np.save(file, values)
    assert is_right()
    assert file.read_bytes() == good
