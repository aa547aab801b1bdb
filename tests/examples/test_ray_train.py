"""examples/ray_train.py: two workers of Ray train as one device does."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mirror

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


def on_one_device(directory):
    spec = importlib.util.spec_from_file_location("ray_train", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with mirror.MirroredStrategy(["cpu"]) as strategy:
        return example.train(strategy, directory)


@pytest.mark.slow
def test_workers_of_ray_train_as_one_device(tmp_path):
    pytest.importorskip("ray.train")
    environment = {
        **os.environ,
        "PYTHONPATH": str(EXAMPLE.parents[1]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listens on loopback alone
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path / "shared")],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"losses"')]
    found = json.loads(line)
    assert found["num_replicas"] == 2
    assert found["losses"] == pytest.approx(on_one_device(tmp_path / "alone"), abs=1e-5)
