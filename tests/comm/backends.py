"""Every backend on every number of devices that this machine has or simulates."""

import threading

import pytest
import torch

from mirror import comm
from mirror.comm.collective_lock import launch_order
from tests.comm.nccl.fake_nccl import MISSING, FakeNccl
from tests.pairs import EXHAUSTIVE


def _places():
    yield from (["cpu"] * n for n in range(1, 9))
    if torch.cuda.is_available():
        yield from (["cuda:0"] * n for n in (1, 2, 3, 8))
        if torch.cuda.device_count() > 1:
            yield [f"cuda:{i}" for i in range(torch.cuda.device_count())]


# Of 5 to 7 replicas is true what is of 3, 4 and 8; of 4, for two even islands alone.
BETWEEN = [["cpu"] * n for n in (5, 6, 7)]
CASES = {
    f"{name}-{place[-1]}-x{len(place)}": (name, place)
    for place in _places()
    for name in comm.available(place)
}
THREE = [*comm.available(["cpu"] * 3)]
if not MISSING:
    # NCCL's part is played by tests/comm/nccl/fake_nccl.cpp, the calls to it are the real ones.
    CASES |= {f"nccl-cpu-x{n}": ("nccl", ["cpu"] * n) for n in (1, 2, 3, 8)}
    THREE.append("nccl")


def _is_between(name, place):
    return place in BETWEEN or (name != "hierarchical" and place == ["cpu"] * 4)


PARAMS = [
    pytest.param(case, id=name, marks=EXHAUSTIVE * _is_between(*case))
    for name, case in CASES.items()
]


def create(name, place):
    if name == "nccl" and place[0] == "cpu":
        return FakeNccl().communicator(len(place))
    return comm.create(name, place)


def can_launch_elsewhere():
    """Whether another thread could launch a collective now, of any communicator."""
    found = []

    def try_it():
        lock = launch_order.mutex.lock
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return found[0]
