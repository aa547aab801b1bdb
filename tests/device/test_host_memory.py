"""What a step on simulated devices frees is kept for the next one, unless the user says else."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
STEPS, BLOCKS, BYTES = 5, 4, 24 * 2**20
PROGRAM = f"""
import resource, torch, mirror

def step():
    blocks = [torch.ones({BYTES} // 4) for _ in range({BLOCKS})]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

strategy = mirror.MirroredStrategy(["cpu"] * 2)
for _ in range({STEPS}):
    step()
before = faults()
for _ in range({STEPS}):
    step()
kept = resident()
print((faults() - before) * resource.getpagesize() / ({STEPS} * {BLOCKS} * {BYTES}))
strategy.close()
print(kept - resident())
"""

glibc_only = pytest.mark.skipif(
    not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")),
    reason="glibc alone is told",
)


def measured(**variables):
    """Returns the share of a step's memory that is new to it, and what closing gives back."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**clean, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **variables},
    )
    return tuple(map(float, done.stdout.split()))


@glibc_only
def test_a_step_reuses_the_memory_of_the_one_before_and_closing_gives_it_back():
    share, given_back = measured()
    assert share < 0.05
    assert given_back > 0.9 * BLOCKS * BYTES


@glibc_only
def test_what_the_user_has_set_stays():
    share, _ = measured(MALLOC_TRIM_THRESHOLD_="131072")
    assert share > 0.5
