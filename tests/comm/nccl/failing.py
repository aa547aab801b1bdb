"""Requests to the fake library; a failure ends promptly and leaves nothing behind."""

import time

import torch

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
