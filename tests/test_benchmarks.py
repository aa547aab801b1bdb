"""benchmarks/: the programs run and say what they promise; their numbers are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_all_reduce_compares_the_backends_with_gloo_and_a_copy(tmp_path):
    # 4 KiB, for which no target is set: a busy machine must not fail this.
    found = tmp_path / "found.json"
    options = "--replicas 2 --sizes 4096 --rounds 2 --gloo 2 --backends host naive --json".split()
    result = subprocess.run(
        [sys.executable, "benchmarks/all_reduce.py", *options, str(found)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(found.read_text())["rows"]}
    assert list(rows) == ["torch", "host", "naive", "gloo", "copy", "copy-nt"]
    for name, row in rows.items():
        assert f"| {name:12} |      4096 |" in result.stdout
        assert row["us"][0] > 0
        if not name.startswith("copy"):
            assert row["busbw"] == row["algbw"]  # 2(n-1)/n is 1 for n = 2
            assert row["max_error"] < 1e-4


def test_tfrecord_compares_the_ways_to_read_with_plain_reads(tmp_path):
    found = tmp_path / "found.json"
    options = "--record-bytes 300 --file-bytes 3000 --rounds 2 --json".split()
    result = subprocess.run(
        [sys.executable, "benchmarks/tfrecord.py", *options, str(found)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(found.read_text())
    assert rows[0]["over_plain"] == [1, 1, 1]
    names = ["plain read", "in order", "in order, parsed", "by number, shuffled", "index"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert f"| 300 B | {row['name']} |" in result.stdout
        assert 0 < row["mb_per_second"][1] <= row["mb_per_second"][0] <= row["mb_per_second"][2]
