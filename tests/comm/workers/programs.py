"""Programs of workers that exit: each worker is a process started for one test."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.ports import HeldPort

# A timeout of workers that no test waits for: an error that comes earlier comes of its own.
LONG = 3600.0
_ROOT = Path(__file__).parents[3]
# What every worker's program begins with.
PRELUDE = """
import gc, os, sys, time
import torch
import torch.distributed as dist
from mirror.comm.workers.distributed_group import DistributedWorkerGroup
from mirror.threads.user_frames import line_of, user_line
rank = int(os.environ["RANK"])
LONG = 3600.0
def made(seconds=LONG):
    return DistributedWorkerGroup(1, lambda: user_line(sys._getframe(1)), seconds, line_of)
def ready():
    print("ready", flush=True)
"""


class Ended(NamedTuple):
    """How a worker's process has ended."""

    code: int
    out: str
    err: str


class Program:
    """Source that all workers run, each as a process."""

    def __init__(self, source, size=2, *, absent=()):
        self._ports = HeldPort(), HeldPort()
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / "train.py"
        file.write_text(PRELUDE + source)
        self.workers = {}
        for rank in range(size):
            if rank not in absent:
                environ = {
                    **{k: v for k, v in os.environ.items() if not k.startswith("TORCH")},
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self._ports[0].number),
                    "OTHER_PORT": str(self._ports[1].number),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(_ROOT),
                }
                self.workers[rank] = subprocess.Popen(
                    [sys.executable, "-W", "error", str(file)],
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.workers.values():
            process.kill()
            process.communicate()
        for port in self._ports:
            port.close()
        self._folder.cleanup()

    def ready(self):
        """Waits until every worker has said so."""
        for process in self.workers.values():
            while (line := process.stdout.readline()) != "ready\n":
                assert line, process.stderr.read()

    def signal(self, rank, number):
        os.kill(self.workers[rank].pid, number)

    def ended(self, *ranks, within=600.0):
        """Returns how these workers have ended, all without any; far sooner than ``LONG``."""
        found = []
        for rank in ranks or tuple(self.workers):
            out, err = self.workers[rank].communicate(timeout=within)
            found.append(Ended(self.workers[rank].returncode, out, err))
        return found


def run(source, size=2):
    """Returns how all workers of a program have ended."""
    with Program(source, size) as program:
        program.ready()
        return program.ended()
