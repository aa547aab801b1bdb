"""mirror/device/host.py: the OpenMP threads of one thread end, and can be started again."""

import os
import threading

import pytest
import torch

from mirror.device.host import release_thread_pool

pytestmark = pytest.mark.skipif(release_thread_pool is None, reason="this OpenMP cannot end teams")
LARGE = torch.linspace(-1, 1, 1_000_000)


@pytest.fixture(autouse=True)
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    release_thread_pool()
    torch.set_num_threads(before)


def num_threads():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted there")
def test_a_team_ends_and_comes_again_and_computes_the_same():
    release_thread_pool()
    alone = num_threads()
    expected = LARGE.sum()
    assert num_threads() == alone + 2
    release_thread_pool()
    assert num_threads() == alone
    assert torch.equal(LARGE.sum(), expected)
    assert num_threads() == alone + 2


def test_it_ends_no_team_of_another_thread():
    found, may_go_on, is_done = [], threading.Event(), threading.Event()

    def compute():
        torch.set_num_threads(3)
        LARGE.sum()
        is_done.set()
        may_go_on.wait(20)
        found.append(LARGE.sum())

    thread = threading.Thread(target=compute)
    thread.start()
    assert is_done.wait(20)
    for _ in range(3):
        LARGE.sum()
        release_thread_pool()
    may_go_on.set()
    thread.join()
    assert torch.equal(found[0], LARGE.sum())
