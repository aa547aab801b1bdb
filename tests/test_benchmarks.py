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


def test_input_compares_reading_ahead_with_a_plain_loop(tmp_path):
    # Small, so that nothing is learnt of speed; the exit code tells of targets missed.
    found = tmp_path / "found.json"
    options = "--rounds 3 --megabytes 1 --batches 2 --slow-batches 2 --json".split()
    result = subprocess.run(
        [sys.executable, "benchmarks/input.py", *options, str(found)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode in (0, 1), result.stderr
    assert result.stderr == ""
    rows = json.loads(found.read_text())
    assert "1 MB batches, no step: prefetch=2 / plain loop" in rows
    assert "loader 20 ms, step 10 ms: prefetch=2, of the loader's rate" in rows
    for name, (median, low, high) in rows.items():
        assert f"| {name:58} |" in result.stdout
        assert 0 < low <= median <= high
