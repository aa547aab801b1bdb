"""tfrecord.py: TensorFlow's files are read; every damage is found, and may be skipped."""

import gzip
import os
import struct
import zlib
from pathlib import Path

import pytest

from mirror.data.tfrecord.record_reader import RecordReader, masked_crc32c, read_record
from mirror.errors import MirrorError, RecordError
from tests.data.tfrecord.files.values import RECORDS

FILES = Path(__file__).parent / "files"
COMPRESS = {None: bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}
COMPRESSIONS = list(COMPRESS)
TEN = [bytes([i]) * 100 for i in range(10)]  # record i is 100 times i, at byte 116 * i
SIZE = 116


def framed(records):
    return b"".join(checked(struct.pack("<Q", len(data))) + checked(data) for data in records)


def checked(data):
    return data + struct.pack("<I", masked_crc32c(data))


def damaged(data, *places):
    data = bytearray(data)
    for place in places:
        data[place] ^= 0x10
    return bytes(data)


@pytest.fixture
def read(tmp_path):
    """Gives what a file of these bytes reads as: the records, and an error for each damage."""

    def read(data, compression=None):
        path = tmp_path / "file"
        path.write_bytes(data)
        found = []
        with RecordReader(str(path), compression) as reader:
            while True:
                try:
                    record = reader.read()
                except RecordError as error:
                    found.append(error)
                    reader.recover()
                else:
                    if record is None:
                        assert reader.read() is None
                        return found
                    found.append(record)

    return read


def places(found):
    errors = [error for error in found if isinstance(error, RecordError)]
    assert all(f"{error.path}, record {error.record} at" in str(error) for error in errors)
    return [(error.record, error.offset) for error in errors]


def records(found):
    return [data for data in found if isinstance(data, bytes)]


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        ("records.tfrecord", None),
        ("records.tfrecord.gz", "GZIP"),
        ("records.tfrecord.zlib", "ZLIB"),
    ],
)
def test_records_of_tensorflow_are_read_exactly(read, name, compression):
    assert read((FILES / name).read_bytes(), compression) == RECORDS


@pytest.mark.parametrize(
    ("name", "compression"), [("empty.tfrecord", None), ("empty.tfrecord.gz", "GZIP")]
)
def test_a_file_without_records_is_no_damage(read, name, compression):
    assert read((FILES / name).read_bytes(), compression) == []


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_file_without_bytes_has_no_records(read, compression):
    assert read(b"", compression) == []


def test_concatenated_files_are_one(read):
    assert read(framed(TEN[:2]) + framed(TEN[2:])) == TEN
    assert read(gzip.compress(framed(TEN[:2])) + gzip.compress(framed(TEN[2:])), "GZIP") == TEN


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("byte", [12, 60, 111, 112, 115])  # of the data, of their checksum
def test_damaged_data_cost_one_record(read, compression, byte):
    found = read(COMPRESS[compression](damaged(framed(TEN), 3 * SIZE + byte)), compression)
    assert records(found) == TEN[:3] + TEN[4:]
    assert places(found) == [(3, 3 * SIZE)]
    assert "record 3 at byte 348: its 100 bytes are damaged" in str(found[3])


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("byte", range(12))  # of the length, of its checksum
def test_a_damaged_length_costs_one_record_after_a_search(read, compression, byte):
    found = read(COMPRESS[compression](damaged(framed(TEN), 3 * SIZE + byte)), compression)
    assert records(found) == TEN[:3] + TEN[4:]
    assert places(found) == [(3, 3 * SIZE)]
    assert "record 3 at byte 348: its length does not match" in str(found[3])


def test_a_search_finds_records_of_no_bytes_and_among_zeros(read):
    data = framed([b"a", b"\x00" * 5000, b"", b"last"])
    found = read(damaged(data, 17))
    assert records(found) == [b"a", b"", b"last"]


def test_a_search_goes_on_over_its_window(read, monkeypatch):
    monkeypatch.setattr("mirror.data.tfrecord.record_reader.SCAN_BYTES", 64)
    data = damaged(framed(TEN), 0, 5 * SIZE + 8, 6 * SIZE + 3)
    for compression, compress in COMPRESS.items():
        found = read(compress(data), compression)
        assert records(found) == [*TEN[1:5], *TEN[7:]]
        # What a search goes over has no number.
        assert places(found) == [(0, 0), (4, 5 * SIZE)]


def test_damage_of_data_behind_a_search_is_found_too(read):
    found = read(damaged(framed(TEN), 0, SIZE + 50, 2 * SIZE))
    assert records(found) == TEN[3:]
    assert places(found) == [(0, 0), (0, SIZE), (1, 2 * SIZE)]


@pytest.mark.parametrize("left", [1, 11, 12, 13, 111, 112, 115])
def test_a_last_record_that_is_cut_off_is_an_error(read, left):
    found = read(framed(TEN)[: 9 * SIZE + left])
    assert records(found) == TEN[:9]
    assert places(found) == [(9, 9 * SIZE)]
    assert "the file ends before its" in str(found[-1])


def test_a_damaged_last_length_leads_to_the_end(read):
    found = read(damaged(framed(TEN), 9 * SIZE))
    assert records(found) == TEN[:9]
    assert places(found) == [(9, 9 * SIZE)]


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compression_that_is_cut_off_keeps_what_was_before(read, compression):
    whole = COMPRESS[compression](framed(TEN) + framed([os.urandom(3000)]))
    found = read(whole[:-2000], compression)
    assert records(found) == TEN
    assert places(found) == [(10, 10 * SIZE)]
    assert f"the {compression} compression is damaged" in str(found[-1])


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compression_without_its_last_bytes_is_an_error(read, compression):
    found = read(COMPRESS[compression](framed(TEN))[:-1], compression)
    assert records(found) == TEN
    assert places(found) == [(10, 10 * SIZE)]


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_damaged_compression_ends_the_file(read, compression):
    whole = COMPRESS[compression](framed(TEN))
    found = read(damaged(whole, len(whole) - 3), compression)  # in the compression's own checksum
    assert isinstance(found[-1], RecordError)
    assert records(found) == TEN[: len(found) - 1]
    assert "compression is damaged" in str(found[-1])


@pytest.mark.parametrize("actual", COMPRESSIONS)
@pytest.mark.parametrize("said", COMPRESSIONS)
def test_a_wrong_compression_is_named(read, actual, said):
    data = COMPRESS[actual](framed(TEN))
    if said == actual:
        assert read(data, said) == TEN
        return
    with pytest.raises(RecordError, match=f"not have compression={said!r}.*{actual!r}"):
        read(data, said)


def test_another_format_is_one_damage_without_records(read):
    found = read(b"this is a text and not a TFRecord file\n" * 100)
    assert places(found) == [(0, 0)]
    assert len(found) == 1
    assert "or is no TFRecord file" in str(found[0])


def test_a_length_that_no_file_has_takes_no_memory(read):
    head = struct.pack("<Q", 2**62)
    data = framed(TEN) + head + struct.pack("<I", masked_crc32c(head)) + b"little"
    for compression, compress in COMPRESS.items():
        found = read(compress(data), compression)
        assert records(found) == TEN
        assert places(found) == [(10, 10 * SIZE)]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_skipping_and_offsets_lead_to_the_same_records(tmp_path, compression):
    path = str(tmp_path / "file")
    Path(path).write_bytes(COMPRESS[compression](framed(TEN)))
    with RecordReader(path, compression) as reader:
        for i in range(0, 10, 2):
            assert (reader.record, reader.offset) == (i, SIZE * i)
            assert reader.read() == TEN[i]
            assert reader.skip()
        assert not reader.skip()
    with RecordReader(path, compression, offset=7 * SIZE, record=7) as reader:
        assert reader.read() == TEN[7]
        assert reader.record == 8
    with pytest.raises(RecordError, match="record 20 at byte 2320: the file ends before"):
        RecordReader(path, compression, offset=20 * SIZE, record=20)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_skipping_sees_lengths_only(tmp_path, compression):
    path = tmp_path / "file"
    path.write_bytes(COMPRESS[compression](damaged(framed(TEN), 50, SIZE + 3)[:-1]))
    with RecordReader(str(path), compression) as reader:
        assert reader.skip()
        with pytest.raises(RecordError, match=r"record 1 .*its length"):
            reader.skip()
        with pytest.raises(RecordError, match=r"record 1 .*its length"):
            reader.read()
        reader.recover()
        assert (reader.record, reader.offset) == (1, 2 * SIZE)
        assert reader.read() == TEN[2]
        for _ in range(3, 9):
            assert reader.skip()
        with pytest.raises(RecordError, match="ends before its 100 bytes"):
            reader.skip()
        assert not reader.skip()


def test_a_record_at_an_offset_is_verified(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(damaged(framed(TEN), 50, SIZE + 3)[:-1])
    with open(path, "rb") as file:
        number = file.fileno()
        assert read_record(number, str(path), 4, 4 * SIZE) == TEN[4]
        for record, offset, what in [
            (0, 0, "its 100 bytes are damaged"),
            (1, SIZE, "its length"),
            (9, 9 * SIZE, "ends before"),
            (10, 10 * SIZE, "its length"),
            (4, 4 * SIZE + 1, "its length"),
        ]:
            with pytest.raises(RecordError, match=what) as caught:
                read_record(number, str(path), record, offset)
            assert (caught.value.record, caught.value.offset) == (record, offset)


def test_the_error_is_mirrors_own_and_a_value_error():
    assert issubclass(RecordError, MirrorError)
    assert issubclass(RecordError, ValueError)
