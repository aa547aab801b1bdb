"""The libnccl of fake_nccl.cpp, and communicators on it."""

import ctypes
import shutil
import subprocess
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

import torch

from mirror.comm.nccl.libnccl import NcclLibrary
from mirror.comm.nccl.nccl_backend import NcclCommunicator

SOURCE = Path(__file__).with_name("fake_nccl.cpp")
MISSING = None if shutil.which("g++") else "there is no g++"


class FakeNccl:
    """Faults on order, and what is left afterwards; fake_nccl.cpp says what they are."""

    def __init__(self):
        self.library = build()
        self.c = self.library._c
        self.c.fake_sent.restype = ctypes.c_size_t
        self.c.fake_reset()

    def communicator(self, n=3, **options):
        return NcclCommunicator(["cpu"] * n, library=self.library, **options)

    def fail(self, function, number=1, result=2):
        self.c.fake_fail(function.encode(), number, result)

    def hang(self, function, number=1):
        self.c.fake_hang(function.encode(), number)

    def stall(self, function):
        self.c.fake_stall(function.encode())

    def polls(self, number):
        self.c.fake_polls(number)

    def poison(self, result):
        self.c.fake_poison(result)

    def absent(self, rank):
        self.c.fake_absent(rank)

    def calls(self, function):
        return self.c.fake_calls(function.encode())

    @property
    def sent(self):
        """Bytes that the ranks have sent each other."""
        return self.c.fake_sent()

    @property
    def alive(self):
        return self.c.fake_alive()

    def assert_nothing_is_left(self):
        for thread in threading.enumerate():
            if thread.name.startswith("mirror-nccl"):
                thread.join(timeout=60)
                assert not thread.is_alive(), thread
        assert self.alive == 0
        assert self.c.fake_misuses() == 0


@cache
def _compiled():
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "libfake.so")
        subprocess.run([*command, "-pthread", str(SOURCE), "-o", str(path)], check=True)
        return path.read_bytes()


def write_fake(path):
    path.write_bytes(_compiled())


@cache
def build():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "libfake.so")
        write_fake(path)
        return NcclLibrary(path)  # what is loaded stays, though the file goes


# Requests to the fake library; a failure ends promptly and leaves nothing behind

TIMEOUT = 0.5
FUNCTIONS = {
    "all_reduce": "ncclAllReduce",
    "broadcast": "ncclBroadcast",
    "reduce_scatter": "ncclReduceScatter",
    "all_gather": "ncclAllGather",
}


def tensors(n=3, count=6):
    return [torch.full((count,), float(i)) for i in range(n)]


def assert_works(communicator):
    values = tensors(len(communicator.devices))
    communicator.all_reduce(values)
    assert values[0].tolist() == [3.0] * 6


def assert_the_next_one_works(fake):
    fake.c.fake_reset()
    with_next = fake.communicator()
    assert_works(with_next)
    with_next.close()


class Promptly:
    """Asserts that its block ends after the timeout: a hanging call hangs forever."""

    def __init__(self, timeout=TIMEOUT):
        self.timeout = timeout

    def __enter__(self):
        self.start = time.monotonic()

    def __exit__(self, *exception):
        assert time.monotonic() - self.start < self.timeout + 30
