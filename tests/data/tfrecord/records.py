"""Small files of records; each record is its own number."""

from pathlib import Path

from mirror.data import (
    TFRecordWriter,
)

FILES = Path(__file__).parent / "files"
LENGTHS = [3, 0, 5, 1, 4]  # of the files; 13 records, each its own number
ALL = [str(i).encode() for i in range(sum(LENGTHS))]
COMPRESSIONS = [None, "GZIP", "ZLIB"]
RECORD_BYTES = 17  # of those with one digit


def write(folder, compression=None):
    records = iter(ALL)
    paths = [folder / f"{i}.tfrecord" for i in range(len(LENGTHS))]
    for path, length in zip(paths, LENGTHS, strict=True):
        with TFRecordWriter(path, compression) as writer:
            for _ in range(length):
                writer.write(next(records))
    return paths


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


class Worker:
    """What ``get_worker_info`` returns in worker ``id`` of ``num_workers``."""

    def __init__(self, worker_id, num_workers):
        self.id, self.num_workers = worker_id, num_workers
