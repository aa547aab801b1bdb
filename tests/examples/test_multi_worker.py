"""A training with killed or restarted workers ends with the bits of an uninterrupted one."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "multi_worker.py"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


# Runs the example; in each start but the last, one worker kills itself in one of its steps. A test
# that kills it from outside is late on a busy machine.
KILLED = """
import os, runpy, signal, sys
import mirror

kills = sys.argv.pop().split()  # of each start: rank:number of the step
kills = dict(enumerate(kills)).get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
reduce, calls = mirror.MultiWorkerMirroredStrategy.reduce, []

def counted(*args):
    calls.append(None)
    if f"{os.environ['RANK']}:{len(calls)}" == kills:
        os.kill(os.getpid(), signal.SIGKILL)
    return reduce(*args)

mirror.MultiWorkerMirroredStrategy.reduce = counted
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def undisturbed(directory):
    """Runs the example as a worker; returns the digest of what it leaves."""
    return runpy.run_path(str(EXAMPLE))["train"](Path(directory))


@pytest.mark.slow
def test_workers_that_are_killed_cost_restarts_and_no_bits(tmp_path, worker_pool):
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.2"),
            *(str(program), str(EXAMPLE), str(tmp_path / "killed"), "0:13 1:13"),
        ],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if "goes on" in line] == [
        "goes on after step 10",
        "goes on after step 20",
    ]
    digests = worker_pool(2).run(undisturbed, str(tmp_path / "undisturbed"))
    assert [f"done {digest}" for digest in digests] == [lines[-1]] * 2


RESUMABLE_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def lines_of(*command):
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, command)],
        capture_output=True,
        text=True,
        env=RESUMABLE_ENVIRONMENT,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_two_kills_leave_the_same_bits(tmp_path):
    program = ROOT / "tests" / "examples" / "killed.py"
    undisturbed, killed = lines_of(program, tmp_path, "7:SIGKILL", "20:SIGTERM")
    assert undisturbed == killed
    assert undisturbed.startswith("done ")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_many_kills_leave_the_same_bits(seed):
    example = ROOT / "examples" / "resumable.py"
    assert lines_of(example, "--kills", 8, "--seed", seed)[-1] == "the same bits"
