"""Trainings whose workers are killed or restarted end with the bits of one that was not."""

import os
import signal
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


def trained(directory, kill_at=None, rank=0):
    """Runs the example on two workers; kills one at a step; returns the lines it has printed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "1", "--monitor-interval", "0.2", str(EXAMPLE), str(directory)),
    ]
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as launcher:
        for line in launcher.stdout:
            lines.append(line.strip())
            if kill_at is not None and line.startswith(f"step {kill_at} "):
                os.kill(worker(launcher.pid, rank), signal.SIGKILL)
                kill_at = None
        said = launcher.stderr.read()
    assert launcher.returncode == 0, said
    return lines


def worker(launcher, rank):
    """Returns the process id of a worker that a launcher has started."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if b"RANK=%d" % rank in environ:
            return int(child)
    raise AssertionError("there is no such worker")


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_a_restart_and_no_bits(tmp_path):
    undisturbed = trained(tmp_path / "undisturbed")
    for rank in (0, 1):
        lines = trained(tmp_path / f"killed {rank}", 13, rank)
        assert "goes on after step 10" in lines
        assert lines[-1] == undisturbed[-1]
    assert undisturbed[-1].startswith("done ")


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
