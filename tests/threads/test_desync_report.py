"""Where replicas stand can be told at any moment."""

import subprocess
import sys
from pathlib import Path

import pytest

FREEZES = '''
import os, sys, time
import mirror, torch

class Cycle:
    """Garbage whose finalizer gives the GIL away."""
    def __init__(self):
        self.me = self
    def __del__(self):
        [i for i in range(100)]

def deep(depth):
    if depth:
        return deep(depth - 1)
    for _ in range(50):
        Cycle()
    context = mirror.get_replica_context()
    if context.replica_id_in_sync_group == 1:
        time.sleep(0.01)  # long enough for the watcher of a staggered run
    else:
        context.all_reduce("sum", torch.ones(3))

sys.setswitchinterval(1e-5)
strategy = mirror.MirroredStrategy(["cpu"] * 4, schedule="staggered")
end = time.monotonic() + 10
while time.monotonic() < end:
    try:
        strategy.run(deep, args=(20,))
    except mirror.DivergenceError:
        continue
    raise SystemExit("no error")
print("done", flush=True)
os._exit(0)
'''


@pytest.mark.slow
def test_telling_where_replicas_stand_does_not_freeze_the_interpreter():
    """Two threads in ``sys._current_frames()`` while garbage is collected: CPython 3.11 stops.

    It holds a lock of the interpreter's while it makes frame objects; that may collect garbage,
    whose finalizers may give the GIL away to one who waits for that lock with the GIL held.
    """
    result = subprocess.run(
        [sys.executable, "-c", FREEZES],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "done\n", result.stderr
