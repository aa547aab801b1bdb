"""Measures reading TFRecord files on one core, checksums verified, beside plain reads.

The file is in the page cache, so the reader is timed and not the disk. Every candidate reads the
whole file. Plain reads take as many bytes at a time as a record has, without a buffer.

    python benchmarks/tfrecord.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from arguments import ROUNDS, at_least, new_file
from timing import Samples, interleaved

from mirror.data import FixedLenFeature, TFRecordDataset, TFRecordWriter, serialize_example

TARGET_MB_S = 150
TARGET_BYTES = 100_000
MAX_RECORDS = 10_000
FEATURES = {"image": FixedLenFeature((), bytes), "label": FixedLenFeature((), np.int64)}


@dataclass(frozen=True)
class Row:
    """One way to read a file."""

    name: str
    record_bytes: int
    num_records: int
    samples: Samples
    plain: Samples

    @property
    def mb_per_second(self) -> tuple[float, float, float]:
        size = self.record_bytes * self.num_records / 1e6
        low, high = self.samples.spread
        return size / self.samples.median, size / high, size / low

    @property
    def over_plain(self) -> tuple[float, float, float]:
        ratios = self.samples.over(self.plain)
        return ratios.median, *ratios.spread

    @property
    def misses_target(self) -> bool:
        checked = self.record_bytes >= TARGET_BYTES and self.name == "in order"
        return checked and self.mb_per_second[0] < TARGET_MB_S


def measure(folder: Path, record_bytes: int, num_bytes: int, rounds: int) -> list[Row]:
    """Times the ways to read a file of examples with records of about ``record_bytes``."""
    path = folder / f"{record_bytes}.tfrecord"
    generator = np.random.default_rng(0)
    num_records = min(max(1, num_bytes // record_bytes), MAX_RECORDS)
    overhead = len(_example(0, b"\x00" * max(1, record_bytes - 64))) - max(1, record_bytes - 64)
    with TFRecordWriter(path) as writer:
        for i in range(num_records):
            writer.write(_example(i % 100, generator.bytes(max(1, record_bytes - overhead))))
    dataset = TFRecordDataset(path)
    parsed = TFRecordDataset(path, features=FEATURES)
    order = generator.permutation(len(dataset)).tolist()
    candidates: dict[str, Callable[[], object]] = {
        "plain read": lambda: _read_plain(path, path.stat().st_size // num_records),
        "in order": lambda: _exhaust(dataset),
        "in order, parsed": lambda: _exhaust(parsed),
        "by number, shuffled": lambda: [len(dataset[i]) for i in order],
        "index": lambda: len(TFRecordDataset(path)),
    }
    samples = interleaved(candidates, rounds=rounds, warmup=1)
    plain = samples["plain read"]
    return [Row(name, record_bytes, num_records, taken, plain) for name, taken in samples.items()]


def _example(label: int, image: bytes) -> bytes:
    return serialize_example({"image": image, "label": label})


def _read_plain(path: Path, size: int) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(size):
            pass


def _exhaust(dataset: TFRecordDataset) -> None:
    for _ in dataset:
        pass


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows; returns 1 if large records are read slower than the target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record-bytes", type=at_least(1), nargs="+", default=[200, 100_000])
    parser.add_argument("--file-bytes", type=at_least(1), default=50_000_000)
    parser.add_argument("--rounds", type=ROUNDS, default=9)
    parser.add_argument("--json", type=new_file)
    arguments = parser.parse_args(argv)
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for record_bytes in arguments.record_bytes
            for row in measure(Path(folder), record_bytes, arguments.file_bytes, arguments.rounds)
        ]
    print("| record | what | MB/s | us a record | time / plain read |\n|---|---|---|---|---|")
    for row in rows:
        speed, low, high = row.mb_per_second
        ratio, ratio_low, ratio_high = row.over_plain
        print(
            f"| {row.record_bytes} B | {row.name}{' MISSED' if row.misses_target else ''} "
            f"| {speed:.0f} ({low:.0f} to {high:.0f}) "
            f"| {row.samples.median / row.num_records * 1e6:.1f} "
            f"| {ratio:.2f} ({ratio_low:.2f} to {ratio_high:.2f}) |"
        )
    if arguments.json:
        found = [
            {
                "name": row.name,
                "record_bytes": row.record_bytes,
                "mb_per_second": row.mb_per_second,
                "over_plain": row.over_plain,
            }
            for row in rows
        ]
        Path(arguments.json).write_text(json.dumps(found, indent=1))
    return int(any(row.misses_target for row in rows))


if __name__ == "__main__":
    sys.exit(main())
